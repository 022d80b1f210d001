"""What a save in the background costs training, in the loop of ``shoal train`` itself, by a clock read at every turn.

A turn of the loop is all there is: the step, digests before and after its update, the copy, the metrics. What a save
costs is how much longer two turns are than those without one: the turn that it ends, and the next, whose update has to
wait for the copy. Turns while the rest is written are told apart. A row for a step of one micro-batch, and one for a
step of several, as a run with a usual batch has it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import record
from rich.console import Console

from shoal.facts.config.file import load
from shoal.launch.local import prepared
from shoal.observe.flight_recorder import INPUT
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job, resolve
from shoal.train.files import read_rows
from shoal.train.loop import Training, train
from shoal.train.run_directory import RunDirectory

# Turns before the first save, and between one that is written and the next.
WARM_UP, QUIET = 6, 5
NEVER = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=8, help="rows at once")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4], help="micro-batches a step")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument(
        "--directory", type=Path, default=Path.cwd(), help="on the disk that is to be measured"
    )
    parser.add_argument("set", nargs="*", help="as in recipe.precision=fp32")
    options = parser.parse_args()
    for accumulate in options.accumulate:
        values = {
            "model.preset": options.model,
            "recipe.seq": options.seq,
            "recipe.batch": options.micro * accumulate,
            "recipe.precision": "bf16",
            "recipe.lr": 1e-4,
            "recipe.steps": NEVER,
            "checkpoint.every": NEVER,
            "checkpoint.keep": 1,
            "evaluate.every": 0,
        }
        sets = [*(f"{key}={value}" for key, value in values.items()), *options.set]
        job = resolve(load(None, sets, f"dp=1,micro={options.micro}").config)
        with tempfile.TemporaryDirectory(prefix=".checkpoints-", dir=options.directory) as folder:
            measured = measure(job, RunDirectory(Path(folder)), options.saves)
        recipe = job.config.recipe
        record(
            "commit_wait",
            model=job.model.name,
            layout=str(job.layout),
            precision=recipe.precision,
            check_every=job.config.fault.check_every,
            tokens_a_step=recipe.tokens_per_step,
            **measured,
        )


def measure(job: Job, run: RunDirectory, saves: int) -> dict[str, Any]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    clock = Clock(saves)
    dataset = prepared(job.config.data, Console(stderr=True))
    with contextlib.suppress(Enough):
        train(job, run, dataset, Mesh(job.layout, 0, device), bool, clock.enter, guest=clock)
    found = clock.found(run)
    # The next one needs the memory.
    del clock
    gc.collect()
    torch.cuda.empty_cache()
    return found


class Enough(Exception):
    """All saves are measured."""


class Clock:
    """Reads the clock whenever a turn of the loop begins, and decides after which steps there is a save."""

    def __init__(self, saves: int) -> None:
        self.wanted = saves
        self.began: dict[int, float] = {}
        self.saved: list[int] = []  # the steps that were
        self.written: dict[int, int] = {}  # by which turn
        self.next = WARM_UP

    def meet(self, training: Training) -> None:
        self.training = training
        training.commits.due = self.due

    def due(self, step: int, last: bool) -> bool:
        return step == self.next

    def enter(self, phase: str, step: int) -> None:
        if phase != INPUT:
            return
        self.began[step] = time.perf_counter()
        done = step - 1
        if done == self.next:
            self.saved.append(done)
            return
        commits = self.training.commits
        if commits._last_error:
            raise RuntimeError(commits._last_error)
        if len(self.written) < len(self.saved) and commits.committed == self.saved[-1]:
            self.written[self.saved[-1]] = step
            self.next = step + QUIET
            if len(self.saved) == self.wanted:
                raise Enough

    def found(self, run: RunDirectory) -> dict[str, Any]:
        turns = {
            step: self.began[step + 1] - self.began[step] for step in self.began if step + 1 in self.began
        }
        behind = {step for save in self.saved for step in range(save + 2, self.written[save])}
        held_up = {step for save in self.saved for step in (save, save + 1)}
        free = [turn for step, turn in turns.items() if step not in behind | held_up and step > 2]
        usual = statistics.median(free)
        rows = {row["step"]: row for row in read_rows(run.metrics)}
        saves = [
            {
                "after_step": save,
                # For the copies to be asked for; part of the next.
                "waited_s": rows[save + 1]["commit_wait_s"],
                "own_step_extra_s": turns[save] - usual,
                "next_step_extra_s": turns[save + 1] - usual,
                "share_of_a_step": (turns[save] + turns[save + 1]) / usual - 2,
                "written_after_s": self.began[self.written[save]] - self.began[save + 1],
            }
            for save in self.saved
        ]
        shares = [save["share_of_a_step"] for save in saves]
        stages = [saver.stage for saver in self.training.commits._savers.values()]
        while_writing = [turns[step] for step in behind if step in turns]
        return {
            "gigabytes": sum(stage.buffer.numel() for stage in stages) / 1e9,
            "step_s": usual,
            "step_s_spread": [min(free), max(free)],
            "share_of_a_step": statistics.median(shares),
            "worst_share_of_a_step": max(shares),
            "slowdown_while_writing": statistics.median(while_writing) / usual - 1 if while_writing else None,
            "memory_peak_gib": rows[self.saved[-1] + 1]["memory_peak"] / 2**30,
            "saves": saves,
        }


if __name__ == "__main__":
    main()
