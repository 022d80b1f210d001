"""Steps with adapters, as predicted and as an H200 took them (``benchmarks/adapters.py``); none was fitted on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.facts.cluster.notation import find
from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.time.adapters import adapted_widths
from shoal.predict.time.step import step
from shoal.predict.workload import Workload

ROWS = Path(__file__).parents[3] / "benchmarks/results/adapters.jsonl"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODEL = PRESETS["llama3-8b"]


@pytest.mark.parametrize(("side", "recompute"), [("lora", "none"), ("lora", "full"), ("qlora", "full")])
def test_a_step_takes_what_is_predicted(side: str, recompute: str) -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    measured = [
        row["step_s"]
        for row in rows
        if (row["side"], row["recompute"], row["device"]) == (side, recompute, "H200")
        and row["model"] == MODEL.name
        and row["compiled"]
        and "not_compiled" not in row
    ]
    lora = Lora(rank=16, alpha=32.0, targets=list(TARGETS), base="nf4" if side == "qlora" else "bf16")
    recipe = Recipe(seq=4096, batch=2, steps=100, precision="bf16", clip=1.0)
    layout = Layout.parse(f"micro=2,recompute={recompute}")
    workload = Workload(MODEL, find("1xH200"), recipe, layout, lora=lora, compile=True)
    assert step(workload).seconds == pytest.approx(measured[-1], rel=0.06)


def test_widths_are_those_of_a_tensor_rank() -> None:
    assert adapted_widths(MODEL, False, TARGETS, 1) == (6 * 4096 + 14336, 3 * 4096 + 2 * 1024 + 2 * 14336)
    # Ranks split what a projection gives, but of ``down_proj`` what it reads.
    assert adapted_widths(MODEL, False, ("up_proj", "down_proj"), 4) == (4096 + 3584, 3584 + 4096)
    assert adapted_widths(MODEL, False, (), 1) == (0, 0)
