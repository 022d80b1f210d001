"""An update whose states are in files against a plain direct copy of as many bytes, in turns: what the ring costs.

The floor reads and writes as an update does, past the system's cache and by as many threads, and does nothing else: no
hashes, no arithmetic. On a GPU the update runs beside the next forward pass; here it is waited for.

python benchmarks/scratch_update.py --scratch DIR
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from direct_copy import DirectCopy
from record import record

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.models.initial import Slice
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.direct_files import THREADS, DirectFiles
from shoal.train.data.loader import Batch
from shoal.train.program import assemble, blueprint
from shoal.train.step import Step

SEQ = 16
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scratch", type=Path, default=Path(), help="a directory of a disk")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.scratch) as scratch:
        place = Path(scratch)
        files = DirectFiles(place)
        step = made(options.layers, files)
        batch = tokens()
        step.issue(1, [batch], SEQ).read()  # states have been written, and buffers made
        copied = DirectCopy(place, files.content)
        updates, copies = [], []
        for number in range(2, options.rounds + 2):
            copies.append(copied.seconds())
            updates.append(update_seconds(step, number, batch))
        record(
            "scratch_update",
            layout="offload=optimizer@nvme",
            parameters=files.content // 12,
            states_bytes=files.content,
            threads=THREADS,
            update_s=statistics.median(updates),
            floor_s=statistics.median(copies),
            ratio=statistics.median(one / other for one, other in zip(updates, copies, strict=True)),
            updates_s=updates,
            floors_s=copies,
        )
        files.close()


def made(layers: int, files: DirectFiles) -> Step:
    model = Model(
        name="filed", family="llama", layers=layers, hidden=1024, heads=16, kv_heads=16, head_dim=64,
        ffn=2816, vocab=264, max_positions=SEQ, init_std=0.02,
    )  # fmt: skip
    recipe = Recipe(seq=SEQ, batch=1, steps=100, precision="bf16")
    mesh = Mesh(Layout.parse("offload=optimizer@nvme"), 0, CPU)
    return assemble(blueprint(model, recipe), recipe, TuneSection(), mesh, fill, files=files)


def fill(slices: Iterable[tuple[str, Slice]]) -> None:
    """Any values will do; Shoal's own take longer to compute than all else here."""
    for _, one in slices:
        one.local.fill_(0.01)


def tokens() -> Batch:
    made = torch.arange(SEQ)[None] * 7 % 264
    positions = torch.arange(SEQ)[None].contiguous()
    return Batch(made, made.roll(-1, 1), positions, None, torch.arange(1), SEQ)


def update_seconds(step: Step, number: int, batch: Batch) -> float:
    """Of the update alone: from when the norm of all gradients is known until the last state is on the disk."""
    host = step.host
    assert host is not None
    taken = []
    start = host.start

    def timed(*arguments: object, **named: object) -> object:
        began = time.perf_counter()
        running = start(*arguments, **named)
        running.result()
        taken.append(time.perf_counter() - began)
        return running

    host.start = timed
    try:
        step.issue(number, [batch], SEQ).read()
    finally:
        host.start = start
    return taken[0]


if __name__ == "__main__":
    main()
