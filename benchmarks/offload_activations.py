"""Steps with and without ``offload=activations`` on this machine's device, in turn: time, peak memory, host bytes.

python benchmarks/offload_activations.py llama3.2-1b --micro 8 --recompute full
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
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
    parser.add_argument("--layout", help="only this one, in this process: prints a row as JSON")
    options = parser.parse_args()
    if options.layout:
        print(json.dumps(measure(options, options.layout)))
        return
    for _ in range(ROUNDS):
        first = {}
        for offload in ("none", "activations"):
            layout = f"micro={options.micro},recompute={options.recompute},offload={offload}"
            # A process for each: what another leaves on the device would be in its peak.
            command = [sys.executable, __file__, *sys.argv[1:], "--layout", layout]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found = json.loads(said.splitlines()[-1])
            first[offload] = found.pop("losses")
            record("offload_activations", model=options.model, seq=options.seq, **found)
        # The first loss alone: from then on they drift apart, as attention's backward pass adds up in any order.
        assert first["none"] == first["activations"], first


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
    taken, losses = [], []
    for number in range(1, WARM_UP + STEPS + 1):
        if on_gpu and number == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        losses.append(step(number, [batch], tokens.numel()).loss)  # it has waited for the device
        taken.append(time.perf_counter() - began)
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
        "losses": losses[:1],
    }


if __name__ == "__main__":
    main()
