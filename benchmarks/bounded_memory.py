"""States of four times what a memory cgroup allows: steps with everything in files, and the same steps without a limit.

Needs root, for the cgroup, which also charges the page cache. Each run is a process of its own with one thread, which
builds the same step as training does: the limited one with ``offload=params@nvme``, the other with ``offload=params``,
which updates on the host as well, and has everything in memory.

python benchmarks/bounded_memory.py --scratch DIR
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from blake3 import blake3
from record import record

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.recipe import Recipe
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.direct_files import DirectFiles
from shoal.parallel.shards import weight
from shoal.train.data.loader import Batch
from shoal.train.program import assemble, blueprint
from shoal.train.step import Step

LAYOUTS = {"limited": "recompute=full,offload=params@nvme", "unlimited": "recompute=full,offload=params"}
GROUPS = Path("/sys/fs/cgroup")
STATES = 12  # bytes of a parameter: a master copy and two moments in fp32
TIMES = 4
SEQ = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path(), help="a directory of a disk")
    parser.add_argument(
        "--check", action="store_true", help="write no row: exit 1 where a bit of a loss or a weight differs"
    )
    parser.add_argument("--run", choices=LAYOUTS, help="only this one, in this process: prints a row as JSON")
    options = parser.parse_args()
    if options.run:
        with TemporaryDirectory(dir=options.scratch) as scratch:
            print(json.dumps(measure(options, Path(scratch))))
        return
    parameters = sum(one.size for one in llama_parameters(network(options.layers)))
    limit = parameters * STATES // TIMES
    found = {}
    for run in LAYOUTS:
        with memory_group(limit if run == "limited" else None) as group:
            command = [sys.executable, __file__, *sys.argv[1:], "--run", run]
            enter = partial(_write, group / "cgroup.procs", "0")
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
            found[run] = json.loads(said.stdout.splitlines()[-1]) | {"most_bytes": most_charged(group)}
    losses = [found[run].pop("losses") for run in LAYOUTS]
    weights = [found[run].pop("weights") for run in LAYOUTS]
    equal = losses[0] == losses[1] and weights[0] == weights[1]
    if options.check:
        print(json.dumps({"equal": equal, "limit_bytes": limit, **found}))
        sys.exit(0 if equal else 1)
    record(
        "bounded_memory",
        parameters=parameters,
        states_bytes=parameters * STATES,
        limit_bytes=limit,
        losses=losses[1],
        losses_equal=losses[0] == losses[1],
        weights_equal=weights[0] == weights[1],
        **found,
    )


def network(layers: int) -> Model:
    return Model(
        name="bounded", family="llama", layers=layers, hidden=512, heads=8, kv_heads=8, head_dim=64,
        ffn=2048, vocab=264, max_positions=SEQ, init_std=0.02,
    )  # fmt: skip


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    model, layout = network(options.layers), Layout.parse(LAYOUTS[options.run])
    recipe = Recipe(seq=SEQ, batch=1, steps=100, precision="fp32")
    files = DirectFiles(scratch) if layout.offload else None
    values = partial(fill, model=model, seed=0)
    mesh = Mesh(layout, 0, torch.device("cpu"))
    step = assemble(blueprint(model, recipe), recipe, TuneSection(), mesh, values, files=files)
    tokens = torch.arange(SEQ)[None] * 7 % model.vocab
    positions = torch.arange(SEQ)[None].contiguous()
    batch = Batch(tokens, tokens.roll(-1, 1), positions, None, torch.arange(1), SEQ)
    began, losses = time.perf_counter(), []
    for number in range(1, options.steps + 1):
        losses.append(step.issue(number, [batch], SEQ).read().loss)
    return {
        "layout": LAYOUTS[options.run],
        "step_s": (time.perf_counter() - began) / options.steps,
        "host_bytes": step.host_bytes,
        "nvme_bytes": files.content if files else 0,
        "losses": losses,
        "weights": digest(step),
    }


def digest(step: Step) -> str:
    """Of every bit of the weights that the optimizer updates."""
    step.settle()
    found = blake3()
    for piece in step.pieces:
        found.update(weight(piece).detach().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


@contextmanager
def memory_group(limit: int | None) -> Iterator[Path]:
    """A memory cgroup of either version, of one process of ours."""
    first = (GROUPS / "memory").is_dir()
    group = GROUPS / ("memory" if first else "") / f"shoal-{os.getpid()}"
    group.mkdir()
    try:
        if limit is not None:
            (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
            swap = group / ("memory.memsw.limit_in_bytes" if first else "memory.swap.max")
            if swap.exists():
                swap.write_text(str(limit if first else 0))
        yield group
    finally:
        group.rmdir()


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def most_charged(group: Path) -> int:
    """The most memory that it ever had, page cache included."""
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return next(int((group / name).read_text()) for name in names if (group / name).exists())


if __name__ == "__main__":
    main()
