"""A busy machine: ranks that start late are no fault, and a launcher that looks late blames the right one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.conftest import Train, after_steps

from shoal.facts.config.file import load
from shoal.launch import local
from shoal.launch.agent import Agent
from shoal.launch.assignment import Assignment
from shoal.launch.report import FINISHED
from shoal.launch.worker import work
from shoal.observe.flight_recorder import STEP, Channel, FlightEntry, FlightReader, Snapshot
from shoal.plan.resolve import resolve
from shoal.train.guard.processes import is_gone, starved
from shoal.train.guard.stacks import Standing
from shoal.train.guard.watchdog import LOOK_SECONDS, Limits, Watchdog
from shoal.train.outcome import Outcome
from shoal.train.run_directory import RunDirectory

LATE_SECONDS = 2.5


def start_late(assignment: Assignment) -> Outcome | None:
    """What a rank's process calls here: the second one gets no processor for a while."""
    if os.environ["RANK"] == "1":
        time.sleep(LATE_SECONDS)
    return work(assignment)


def test_a_rank_may_start_later_than_a_collective_may_take(
    settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    job = resolve(load(None, settings(fault__timeout=1, recipe__steps=3), "dp=2").config)
    entrypoint = f"{__name__}:{start_late.__name__}"
    run = RunDirectory(tmp_path / "run")
    report = local.train(job, run, False, Console(stderr=True), entrypoint=entrypoint)
    assert report.code == FINISHED, report.message
    assert not run.faults.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_looks_late_names_who_died(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """By then the peers of the dead rank are dead as well: of the lost connection, or ended by torch's agent."""
    watch = Agent.watch

    def late(self: Agent, seconds: float) -> None:
        processes = [*self.processes().values()]
        time.sleep(seconds)
        deadline = time.monotonic() + 10
        while (
            any(map(is_gone, processes)) and time.monotonic() < deadline and not all(map(is_gone, processes))
        ):
            time.sleep(0.01)
        watch(self, 0.0)

    monkeypatch.setattr(Agent, "watch", late)

    def kill() -> None:
        snapshot = FlightReader(RunDirectory(tmp_path / "run").flight(1)).look()
        assert snapshot is not None
        os.kill(snapshot.pid, number)

    with after_steps(tmp_path / "run", 5, kill):
        run = train(layout="dp=2", recipe__steps=60, checkpoint__every=20)
    assert run.report.code == FINISHED, run.report.message
    rows = [json.loads(line) for line in run.directory.faults.read_text().splitlines()]
    assert [(row["kind"], row["rank"]) for row in rows if row["kind"] != "restart"] == [("killed", 1)]
    assert rows[0]["message"] == f"rank 1 failed: killed by {number.name}"


# A rank that has no processor.


@contextmanager
def busy_processes(processor: int, count: int) -> Iterator[list[int]]:
    program = f"import os; os.sched_setaffinity(0, [{processor}]); print(flush=True)\nwhile True: pass"
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(count)
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_who_waits_for_a_processor_is_seen_to() -> None:
    assert starved(os.getpid()) >= 0.0 and starved(1 << 30) == 0.0
    with busy_processes(min(os.sched_getaffinity(0)), 2) as processes:
        before, began = [starved(process) for process in processes], time.monotonic()
        while time.monotonic() - began < 60 and sum(map(starved, processes)) - sum(before) < 0.3:
            time.sleep(0.05)
        grown = [starved(process) - earlier for process, earlier in zip(processes, before, strict=True)]
    # They share one processor, so one of them waits at any time; and nobody waits for longer than it takes.
    assert sum(grown) >= 0.3 and max(grown) <= time.monotonic() - began


class Shown:
    """Two ranks, the second of which has not joined what the first waits in."""

    def __init__(self) -> None:
        self.channel = Channel("0", "dp", (0, 1))
        self.starved = 0.0

    def look(self, entries: bool = False) -> list[Snapshot]:
        entry = FlightEntry(self.channel, 4, "all_reduce", 8, time.monotonic(), "step.py:1")
        first = Snapshot(10, 0, 7, STEP, 1, {self.channel: 4}, (entry,))
        return [first, replace(first, pid=11, counts={self.channel: 3}, entries=(), starved=self.starved)]

    def progressing(self) -> bool:
        return False

    def any_stopped(self) -> bool:
        return False

    def evidence(self, snapshots: Sequence[Snapshot], patience: float) -> dict[int, Standing]:
        return {0: Standing(), 1: Standing()}


def test_a_rank_that_has_no_processor_does_not_stall() -> None:
    """Its peers have waited for longer than the limit; then it has one, and does not come."""
    ranks, limit = Shown(), 4.0 * LOOK_SECONDS
    watchdog, began = Watchdog(ranks, Limits(step=limit, patient=60.0)), time.monotonic()
    watchdog.poll()
    while time.monotonic() < began + 2 * limit:
        ranks.starved += 60.0
        assert watchdog.poll() is None
        time.sleep(LOOK_SECONDS / 5)
    while (verdict := watchdog.poll()) is None and time.monotonic() < began + 60:
        time.sleep(LOOK_SECONDS / 5)
    assert verdict is not None and verdict.rank == 1
