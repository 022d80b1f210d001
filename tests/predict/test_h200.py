"""Peak allocated memory of whole steps that were measured on one H200, from shapes alone.

The steps are a hand-written Llama's (torch 2.11): fused RMS norms; block by block compiled, where the activation is
made anew in the backward pass; a linear cross-entropy that makes gradients in the forward pass, 8192 tokens at a time
and at least in two pieces. Not here, because they are not what a ``Stack`` describes: autocast (fp32 residual stream),
compilation of the whole step or with a memory budget (a solver decides what is kept), hand-picked lists of saved
operators, and steps whose gradients stay allocated.
"""

from __future__ import annotations

import json
from pathlib import Path

from shoal.facts.cluster.notation import find
from shoal.facts.cluster.stack import Stack
from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.memory import ledger, rank_gradients
from shoal.predict.memory.device import beside_tensors
from shoal.predict.memory.inventory import rank_inventories
from shoal.predict.memory.peaks import peaks
from shoal.predict.memory.states import optimizer_states, parameters
from shoal.predict.workload import Workload

ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Name, model, sequences of 4096 tokens, precision, loss, tokens of a piece, compiled, q k v joined, recompute, GiB.
Row = tuple[str, str, int, str, str, int | None, bool, bool, str, float]
ROWS: list[Row] = [
    ("c2", "1b", 4, "master", "fused", None, True, True, "none", 40.55),
    ("c1", "1b", 4, "master", "plain", None, True, True, "none", 59.57),
    ("c3", "1b", 8, "master", "fused", None, True, True, "none", 60.52),
    ("c4", "1b", 16, "master", "fused", None, True, True, "none", 100.47),
    ("c5", "1b", 16, "master", "fused", None, True, True, "full", 27.61),
    ("e2", "1b", 4, "pure", "plain", None, False, True, "none", 54.37),
    ("e3", "1b", 4, "master", "plain", None, False, True, "none", 63.57),
    ("e4", "1b", 4, "master", "fused", None, False, True, "none", 44.55),
    ("e6", "1b", 8, "master", "fused", None, False, True, "none", 68.52),
    ("e8", "1b", 8, "master", "fused", None, False, True, "full", 22.96),
    ("e11", "1b", 8, "master", "fused", None, False, False, "none", 66.02),
    ("8b-blk-B4", "8b", 4, "pure", "fused", None, True, True, "none", 123.27),
    ("8b-blk-B2", "8b", 2, "pure", "fused", None, True, True, "none", 84.59),
    ("8b-blk-B8-full", "8b", 8, "pure", "fused", None, True, True, "full", 65.95),
    ("8b-eager-B2", "8b", 2, "pure", "fused", None, False, True, "none", 91.59),
    ("8b-eager-B4-full", "8b", 4, "pure", "fused", None, False, True, "full", 62.34),
    ("8b16-blk-B4", "8b16", 4, "master", "fused", None, True, True, "none", 101.07),
    ("c7", "1b", 8, "master", "fused", None, True, False, "none", 58.02),
    ("c13-eager", "1b", 1, "master", "fused", None, False, True, "none", 23.64),
    ("c13-blk", "1b", 1, "master", "fused", None, True, True, "none", 22.64),
    ("plain-pure", "1b", 8, "pure", "fused", None, True, True, "none", 51.32),
    ("chunk16k", "1b", 8, "master", "fused", 16384, True, True, "none", 64.45),
    ("chunk4k", "1b", 8, "master", "fused", 4096, True, True, "none", 58.58),
]
MODELS = {
    "1b": PRESETS["llama3.2-1b"],
    "8b": PRESETS["llama3-8b"],
    "8b16": PRESETS["llama3-8b"].model_copy(update={"layers": 16}),
}


def predicted_gib(row: Row) -> float:
    _, size, sequences, precision, loss, piece, compiled, joined, recompute, _ = row
    stack = Stack(
        "hand-written",
        weights="master" if precision == "master" else "cast",
        norms="fused",
        activation="fused" if compiled else "eager",
        joined=joined,
        loss="fused" if loss == "fused" else "full",
        loss_tokens=piece or min(8192, sequences * 4096 // 2),
    )
    recipe = Recipe(
        seq=4096,
        batch=sequences,
        steps=1,
        precision="bf16",
        states="bf16" if precision == "pure" else "fp32",
    )
    layout = Layout.parse(f"micro={sequences},recompute={recompute}")
    workload = Workload(MODELS[size], find("1xH200"), recipe, layout, stack)
    (rank,) = rank_inventories(workload)
    resting = parameters(rank).device + optimizer_states(rank).device + beside_tensors(rank)
    # Shoal's loss lets go of a chunk's logits before it makes the next one's, and adds chunks' gradients of the weight
    # up in fp32; this one does neither.
    more, model = 0, MODELS[size]
    if loss == "fused" and sequences * 4096 > (stack.loss_tokens or 0):
        more = 2 * model.vocab * (stack.loss_tokens or 0) - 4 * model.vocab * model.hidden
    found = peaks(rank_gradients(rank))
    return (resting + max(one.total() + more * (one.name == "loss") for one in found)) / 2**30


def test_measured_peaks() -> None:
    errors = {}
    for row in ROWS:
        name, measured = row[0], row[-1]
        errors[name] = predicted_gib(row) / measured - 1
        print(f"{name:18} predicted {predicted_gib(row):7.2f} measured {measured:7.2f} {errors[name]:+.2%}")
    assert sum(map(abs, errors.values())) / len(errors) < 0.003
    assert max(map(abs, errors.values())) < 0.02, errors


def test_peaks_of_adapters_on_an_h200_are_as_predicted() -> None:
    """Rows of ``benchmarks/adapters.py``; that of 4 bits ran eager, as its blocks could not be compiled then."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "adapters.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ours = [row for row in rows if row["side"] != "peft" and row["device"] == "H200"]
    assert len(ours) >= 3
    for row in ours:
        base = "nf4" if row["side"] == "qlora" else "bf16"
        lora = Lora(rank=16, alpha=32.0, targets=ADAPTED, base=base)
        recipe = Recipe(seq=row["seq"], batch=row["micro"], steps=100, precision="bf16")
        layout = Layout.parse(f"micro={row['micro']},recompute={row['recompute']}")
        compiled = "not_compiled" not in row
        workload = Workload(
            PRESETS[row["model"]], find("1xH200"), recipe, layout, lora=lora, compile=compiled
        )
        assert abs(ledger(workload).peak_allocated / row["peak_bytes"] - 1) < 0.005, row
