"""Steps with and without ``offload=activations`` on this machine's device, in turn: time, peak memory, host bytes.

python benchmarks/offload_activations.py llama3.2-1b --micro 8 --recompute full
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from record import record

from shoal.facts.cluster.this_machine import look
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.predict.memory import ledger
from shoal.predict.workload import Workload
from shoal.train.data.loader import Batch
from shoal.train.program import BACKEND, assemble, blueprint

WARM_UP, STEPS, ROUNDS = 3, 8, 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--recompute", default="full", choices=["full", "selective"])
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    for _ in range(ROUNDS):
        losses = {}
        for offload in ("none", "activations"):
            found = measure(options, f"micro={options.micro},recompute={options.recompute},offload={offload}")
            losses[offload] = found.pop("loss")
            record("offload_activations", model=options.model, seq=options.seq, **found)
        assert losses["none"] == losses["activations"], losses


def measure(options: argparse.Namespace, layout: str) -> dict[str, object]:
    """Seconds of a step, from host to host; median."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model, parsed = PRESETS[options.model], Layout.parse(layout)
    recipe = Recipe(seq=options.seq, batch=options.micro, steps=100, precision="bf16")
    backend = BACKEND if on_gpu and not options.eager else None
    values = partial(fill, model=model, seed=0)
    step = assemble(
        blueprint(model, recipe), recipe, TuneSection(), Mesh(parsed, 0, device), values, compile_with=backend
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, model.vocab, (options.micro, options.seq)).to(device)
    positions = torch.arange(options.seq, device=device).expand_as(tokens).contiguous()
    batch = Batch(
        tokens,
        tokens.roll(-1, 1),
        positions,
        None,
        torch.arange(options.micro, device=device),
        tokens.numel(),
    )
    taken, seen = [], None
    for number in range(1, WARM_UP + STEPS + 1):
        if on_gpu and number == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        seen = step(number, [batch], tokens.numel())  # it returns numbers that the device has come to
        taken.append(time.perf_counter() - began)
    assert seen is not None
    predicted = ledger(
        Workload(model, look(), recipe, parsed, tune=TuneSection(), compile=backend is not None)
    )
    compiled = step.placed.compiled
    return {
        "layout": layout,
        "compiled": compiled is not None and compiled.problem is None,
        "step_s": statistics.median(taken[WARM_UP:]),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "predicted_peak_bytes": predicted.peak_allocated,
        "host_bytes": step.placed.host.bytes,
        "predicted_host_bytes": predicted.host,
        "loss": seen.loss,
    }


if __name__ == "__main__":
    main()
