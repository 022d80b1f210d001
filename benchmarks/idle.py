"""How long a GPU has nothing to do while a run trains, out of a trace of some steps of ``shoal train``'s own loop.

``python benchmarks/idle.py MODEL BATCH…``: one row for each batch (one micro-batch of that many sequences of 4,096
tokens), with the share of a step in which no kernel and no copy runs, the longest such gap, and how long the host takes
to issue a step and waits for its rows. The loop has its meter, guards and defaults; rows come from a file.
Only what the device does is traced: the profiler's notes of operators would slow the host down.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from record import record
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from shoal.facts.config import Config
from shoal.launch import local
from shoal.launch.init_rank import init_rank
from shoal.launch.manifest import describe_plan
from shoal.launch.ranks import run_ranks
from shoal.observe.intervals import total, union, without
from shoal.plan.resolve import Job, resolve
from shoal.prove.bench.tokens import write_tokens
from shoal.train.data.loader import Batch, Loader
from shoal.train.files import read_rows
from shoal.train.loop import Training
from shoal.train.run_directory import RunDirectory

SEQ = 4096
# Steps before the trace, and in it. The first of these begins when the profiler has started.
FIRST, TRACED = 14, 9
# What ends a step on the device.
UPDATE = "update_chunk"


def job_of(model: str, batch: int) -> Job:
    recipe = {"seq": SEQ, "batch": batch, "steps": FIRST + TRACED + 1, "precision": "bf16", "lr": 3e-4}
    return resolve(
        Config.model_validate(
            {
                "model": {"preset": model},
                "recipe": recipe,
                "layout": f"micro={batch}",
                "evaluate": {"every": 0, "batches": 0, "samples": 0},
                "checkpoint": {"every": 0},
            }
        )
    )


class TracedLoader(Loader):
    """A run's own loader, which starts and stops the profiler between two steps."""

    def __init__(self, loader: Loader, profiler: profile) -> None:
        super().__init__(loader.samples, loader.order, loader.clock, loader.heldout, loader.validation)
        self._profiler = profiler

    def steps(
        self, first: int, last: int, positions: Callable[[int], Sequence[Sequence[int]]]
    ) -> Generator[tuple[int, list[Batch]]]:
        with closing(super().steps(first, last, positions)) as source:
            for step, batches in source:
                if step == FIRST:
                    self._profiler.start()
                if step == FIRST + TRACED:
                    torch.cuda.synchronize()
                    self._profiler.stop()
                yield step, batches


def measure(
    rank: int, world: int, store: dist.Store, job: Job, dataset: Path, folder: Path
) -> dict[str, Any]:
    mesh = init_rank(job, rank, rank, store)
    run = RunDirectory(folder)
    run.path.mkdir(mode=0o700)
    run.write_start(job, {}, describe_plan(job))
    training = Training(job, run, dataset, mesh)
    profiler = profile(activities=[ProfilerActivity.CUDA])
    training.loader = TracedLoader(training.loader, profiler)
    issue, issuing = training.step.issue, list[float]()

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        found = issue(*arguments)
        issuing.append(time.perf_counter() - began)
        return found

    training.step.issue = timed
    training.run_to_end(bool)
    busy = sorted(
        (event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    # A step's updates may be several launches: its last one ends it.
    ends = [end for _, end, name in busy if UPDATE in name]
    steps = [first for first, second in pairwise(ends) if second - first > 1e-2] + ends[-1:]
    window = (steps[0], steps[-1])
    gaps = without([window], union((start, end) for start, end, _ in busy))
    rows = read_rows(run.metrics)[FIRST : FIRST + TRACED - 1]
    compiled = training.program.placed.compiled
    mesh.close()
    return {
        "blocks": "eager" if compiled is None or compiled.problem else "compiled",
        "steps": len(steps) - 1,
        "step_ms": 1e3 * (window[1] - window[0]) / (len(steps) - 1),
        "kernels_a_step": sum(window[0] <= start < window[1] for start, _, _ in busy) / (len(steps) - 1),
        "idle_share": total(gaps) / (window[1] - window[0]),
        "longest_gap_ms": 1e3 * max((end - start for start, end in gaps), default=0.0),
        "host_issues_ms": 1e3 * statistics.median(issuing[FIRST : FIRST + TRACED - 1]),
        "input_wait_ms": 1e3 * statistics.median(float(row["input_wait_s"]) for row in rows),
        "untraced_step_ms": 1e3
        * statistics.median(float(row["step_s"]) for row in read_rows(run.metrics)[4 : FIRST - 2]),
    }


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    model, *batches = sys.argv[1:]
    local.warm_workers((*local.PRELOAD, "shoal.launch.init_rank"))
    for batch in map(int, batches):
        job = job_of(model, batch)
        with TemporaryDirectory(prefix="shoal-idle-") as name:
            dataset = write_tokens(job, FIRST + TRACED + 1, Path(name) / "tokens")
            (found,) = run_ranks(1, measure, (job, dataset, Path(name) / "run"), 300.0)
        record("idle", model=model, seq=SEQ, batch=batch, **found)


if __name__ == "__main__":
    main()
