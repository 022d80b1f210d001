"""A rank that hangs, in ``shoal train`` for real: rank, collective and line are named, stacks kept, the run goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Run, Train, after_steps
from tests.waiting import waited

from shoal.launch.report import FAILED, FINISHED
from shoal.observe.flight_recorder import FlightReader
from shoal.train.run_directory import RunDirectory


@contextmanager
def stopped(run: Path, rank: int, after: int) -> Iterator[None]:
    """SIGSTOP for one rank once the run has recorded so many steps, while the body runs."""

    def stop() -> None:
        snapshot = FlightReader(RunDirectory(run).flight(rank)).look()
        assert snapshot is not None
        os.kill(snapshot.pid, signal.SIGSTOP)

    with after_steps(run, after, stop):
        yield


def faults(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.directory.faults.read_text().splitlines()]


def test_a_stalled_rank_is_the_last_word_of_the_run(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Without commits: a rank that is stopped in one is given the time that a slow disk may take.
    options = {"checkpoint__every": 0, "fault__stall": 2, "fault__max_restarts": 0}
    with stopped(tmp_path / "run", 1, after=5):
        run = train(layout="fsdp=2", recipe__steps=100_000, **options)
    assert run.report.code == FAILED
    first, *lines = run.report.message.splitlines()
    assert first.startswith("rank 1 stalled: in step ")
    (row,) = faults(run)
    collective = row["collective"]
    # Stopped on its way to a collective or, more seldom, inside of one.
    assert f" {collective['op']} #{collective['number']} of group fsdp (ranks 0,1, " in first
    assert f" at {collective['where']}" in first
    assert waited(first) >= 2
    assert "src/shoal/" in collective["where"] and collective["bytes"] > 0
    assert lines[0].startswith("  rank 1: stopped by a signal or a debugger, at src/shoal/")
    assert lines[1].startswith("  rank 0: at src/shoal/")
    assert (row["kind"], row["rank"], row["missing"]) == ("stall", 1, [1])
    assert run.report.message.startswith(row["message"])
    for rank in range(2):
        text = (run.directory.stacks / f"rank-{rank:05d}.txt").read_text()
        assert "most recent call first" in text and " of fsdp " in text
    # Said once, and not as it happened too: the report that is printed at the end has it.
    assert "rank 1 stalled" not in capfd.readouterr().err


def test_after_a_stall_the_workers_are_restarted_and_the_curve_is_the_same(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The next commit is so far away that the rank is stopped before it.
    options = {"recipe__steps": 40, "checkpoint__every": 10}
    with stopped(tmp_path / "stalled", 0, after=12):
        stalled = train("stalled", "pp=2", fault__stall=2, **options)
    assert stalled.report.code == FINISHED, stalled.report.message
    assert [row["kind"] for row in faults(stalled)] == ["stall", "restart"]
    assert "rank 0 stalled: in step" in capfd.readouterr().err
    assert stalled.hexes == train("whole", "pp=2", **options).hexes


def test_without_a_watch_nothing_is_recorded(train: Train) -> None:
    for stall, entered in ((0, False), (30, True)):
        run = train(f"stall-{stall}", "dp=2", recipe__steps=2, fault__stall=stall, checkpoint__every=0)
        assert run.report.code == FINISHED, run.report.message
        snapshot = FlightReader(run.directory.flight(1)).look(entries=True)
        assert snapshot is not None and snapshot.step == 2
        assert bool(snapshot.entries) == entered
