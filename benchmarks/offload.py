"""Steps with and without offload on this machine's device, in turn: time, peak memory, host bytes, the floor.

python benchmarks/offload.py llama3.2-1b --micro 8 --layouts "recompute=full;recompute=full,offload=activations"
python benchmarks/offload.py llama3.2-1b --micro 8 --layouts "dp=1;offload=optimizer;offload=optimizer:0.6"
python benchmarks/offload.py llama3.2-1b --micro 1 --cap-gib 12 --scratch DIR --layouts "offload=optimizer@nvme"
python benchmarks/offload.py llama3-8b --micro 1 --cap-gib 48 --rounds 1 --layouts "recompute=full,offload=optimizer"

Two layouts are none of Shoal's: ``floor``, the copies and the host's update alone (benchmarks/offload_floor.py), and
``fsdp2``, torch's CPUOffloadPolicy on the same network (benchmarks/offload_policy.py).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from direct_copy import DirectCopy
from record import record

from shoal.facts.cluster.this_machine import look
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.direct_files import DirectFiles
from shoal.predict.memory import ledger
from shoal.predict.time.step import step as predicted_step
from shoal.predict.workload import Workload
from shoal.train.data.loader import Batch
from shoal.train.program import BACKEND, assemble, blueprint

WARM_UP = 3
HERE = Path(__file__).parent
COPIED = 2 << 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--batch", type=int, help="sequences per step; by default one micro-batch")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layouts", default="recompute=full;recompute=full,offload=activations")
    parser.add_argument("--cap-gib", type=float, help="of the device's memory, no more than this")
    parser.add_argument("--scratch", type=Path, help="a directory of a disk, for what is offloaded @nvme")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps that are not measured")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--clip", type=float, help="the norm that gradients are clipped to; 0: not at all")
    parser.add_argument(
        "--late", type=float, help="the share of states that are written late, not what was measured"
    )
    parser.add_argument("--layout", help="only this one, in this process: prints a row as JSON")
    options = parser.parse_args()
    if options.layout:
        with TemporaryDirectory(dir=options.scratch) as scratch:
            print(json.dumps(measure(options, options.layout, Path(scratch))))
        return
    for _ in range(options.rounds):
        first = []
        for layout in options.layouts.split(";"):
            if layout in OTHERS:
                found = said_by(OTHERS[layout](options))
                record("offload", model=options.model, seq=options.seq, cap_gib=None, **found)
                continue
            # A process for each: what another leaves on the device would be in its peak.
            command = [sys.executable, __file__, *sys.argv[1:], "--layout", f"micro={options.micro},{layout}"]
            found = said_by(command)
            first.append(found.pop("first_loss"))
            record("offload", model=options.model, seq=options.seq, cap_gib=options.cap_gib, **found)
        # The first loss alone: from then on they drift apart, as attention's backward pass adds up in any order.
        assert len(set(first)) <= 1, first


def said_by(command: list[str]) -> dict[str, Any]:
    """The row that a process prints last."""
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    row: dict[str, Any] = json.loads(said.splitlines()[-1])
    return row


def floor(options: argparse.Namespace) -> list[str]:
    return [sys.executable, str(HERE / "offload_floor.py"), options.model]


def policy(options: argparse.Namespace) -> list[str]:
    shape = ["--micro", str(options.micro), "--seq", str(options.seq), "--steps", str(options.steps)]
    eager = ["--eager"] if options.eager else []
    return [sys.executable, str(HERE / "offload_policy.py"), options.model, *shape, *eager]


OTHERS = {"floor": floor, "fsdp2": policy}


def measure(options: argparse.Namespace, layout: str, scratch: Path) -> dict[str, object]:
    """Seconds of a step that is issued before the last one's numbers are read, as in training; median."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu and options.cap_gib:
        share = options.cap_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
    model, parsed = PRESETS[options.model], Layout.parse(layout)
    recipe = Recipe(seq=options.seq, batch=options.batch or options.micro, steps=100, precision="bf16")
    if options.clip is not None:
        recipe = recipe.model_copy(update={"clip": options.clip})
    backend = BACKEND if on_gpu and not options.eager else None
    values = partial(fill, model=model, seed=0)
    torch.zeros(1, device=device)  # what a device's context takes is nobody's
    resident = _resident()
    files = DirectFiles(scratch) if "@nvme" in layout else None
    step = assemble(
        blueprint(model, recipe),
        recipe,
        TuneSection(),
        Mesh(parsed, 0, device),
        values,
        compile_with=backend,
        files=files,
    )
    late, moments = None if step.host is None else step.host.late, list[tuple[str, float]]()
    if late is not None:
        late.share = options.late
        for name in ("norm_known", "weights_returned", "written"):
            setattr(late, name, _timed(getattr(late, name), name, moments))
    torch.manual_seed(0)
    tokens = torch.randint(0, model.vocab, (options.micro, options.seq)).to(device)
    positions = torch.arange(options.seq, device=device).expand_as(tokens).contiguous()
    rows = torch.arange(options.micro, device=device)
    batch = Batch(tokens, tokens.roll(-1, 1), positions, None, rows, tokens.numel())
    batches = [batch] * parsed.accumulation(recipe.batch)
    targets = tokens.numel() * len(batches)
    ends, issued, first_loss, clipped = [], None, 0.0, 0
    for number in range(1, options.warm_up + options.steps + 2):
        if on_gpu and number == options.warm_up:
            torch.cuda.reset_peak_memory_stats()
        before, issued = issued, step.issue(number, batches, targets)
        if before is not None:
            result = before.read()
            first_loss = first_loss or result.loss
            clipped += bool(recipe.clip and result.grad_norm > recipe.clip)
        ends.append(time.perf_counter())
    taken = [
        after - one for one, after in zip(ends[options.warm_up :], ends[options.warm_up + 1 :], strict=False)
    ]
    resident_more = _resident() - resident
    floor = None
    if files is not None:
        issued.read()
        step.settle()
        # As many bytes as an update reads and writes, at the rate of a few of them.
        copied = min(COPIED, files.content)
        floor = DirectCopy(scratch, copied).seconds() * files.content / copied
    workload = Workload(model, look(), recipe, parsed, tune=TuneSection(), compile=backend is not None)
    predicted = ledger(workload)
    compiled = step.placed.compiled
    return {
        "layout": layout,
        "batch": recipe.batch,
        "compiled": compiled is not None and compiled.problem is None,
        "step_s": statistics.median(taken),
        "predicted_step_s": predicted_step(workload).seconds,
        "disk_floor_s": floor,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "predicted_peak_bytes": predicted.peak_allocated,
        "host_bytes": step.host_bytes,
        "predicted_host_bytes": predicted.host,
        "nvme_bytes": files.content if files else 0,
        "predicted_nvme_bytes": predicted.nvme,
        # The most that the process ever held, pinned memory included, above what it held before the network.
        "resident_more_bytes": resident_more,
        "clipped_steps": clipped,
        # Of the elements that the host updates.
        "late_share": None if late is None else late.chosen_share,
        # Of the last update: from the norm to the last new weight, and from there to the last state.
        "weights_s": _between("norm_known", "weights_returned", moments),
        "late_s": _between("weights_returned", "written", moments),
        "first_loss": first_loss,
    }


def _timed(method: Callable[..., Any], name: str, moments: list[tuple[str, float]]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        moments.append((name, time.perf_counter()))
        return method(*arguments)

    return called


def _between(first: str, second: str, moments: list[tuple[str, float]]) -> float | None:
    """Seconds from the last moment of one kind to the one of another that follows it."""
    begun = next((number for number, (name, _) in reversed(list(enumerate(moments))) if name == first), None)
    if begun is None:
        return None
    end = next((at for name, at in moments[begun:] if name == second), None)
    return None if end is None else end - moments[begun][1]


def _resident() -> int:
    """The most bytes of memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
