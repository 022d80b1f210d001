"""One curve per tracker, whatever becomes of the run, the launcher or the tracker."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.track import feeder
from shoal.launch.track.cursor import Cursor, NewRows
from shoal.launch.track.feeder import Feed
from shoal.launch.track.machine import Machine, read_gpus
from shoal.launch.track.tracker import Held, TrackedRun, Tracker, values_of
from shoal.launch.track.tracking import _beat
from shoal.train.files import StepFile
from shoal.train.run_directory import RunDirectory


class Kept:
    """A tracker that keeps every point, and fails when told to."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.opened: list[Held] = []
        self.files: list[str] = []
        self.broken = False
        self.closed: bool | None = None
        self.tells = False  # whether it knows what it has

    def open(self, run: TrackedRun, held: Held) -> Held:
        self._work()
        self.opened.append(held)
        there = max((step for step, _ in self.points), default=0)
        return Held(held.id or "drawn", max(held.step, there) if self.tells else held.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._work()
        self.points.append((step, values["loss"]))

    def flush(self) -> None:
        self._work()

    def attach(self, path: Path) -> None:
        self.files.append(path.name)

    def close(self, finished: bool) -> None:
        self.closed = finished

    def _work(self) -> None:
        if self.broken:
            raise ConnectionError("the login has expired")

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.points]


def feed_of(path: Path, kept: Kept, said: list[str] | None = None, steps: int = 10) -> Feed:
    def make(name: str) -> Tracker:
        return kept

    run = TrackedRun(path, None, "0123456789abcdef", steps, "dp=1")
    return Feed("kept", run, (said if said is not None else []).append, make)


def train(path: Path, after: int, until: int, loss: float) -> None:
    """As ranks do: rows after the last commit are cut, and their steps done again."""
    rows = StepFile(path / "metrics.jsonl", after)
    for step in range(after + 1, until + 1):
        rows.append({"step": step, "loss": loss, "layout": "dp=1"})


def test_a_run_that_was_killed_and_resumed_in_another_layout_is_one_curve(tmp_path: Path) -> None:
    kept = Kept()
    train(tmp_path, 0, 7, loss=1.0)
    feed_of(tmp_path, kept).feed(0.0)  # and the launcher is killed: no close
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 8, "lo')
    resumed = feed_of(tmp_path, kept)
    resumed.feed(0.0)  # before the ranks have cut the file
    train(tmp_path, 4, 10, loss=2.0)
    resumed.feed(0.0)
    resumed.close()
    assert kept.steps == list(range(1, 11))
    assert [loss for _, loss in kept.points] == [1.0] * 7 + [2.0] * 3
    assert kept.opened == [Held(), Held("drawn", 7)]
    assert kept.closed is True
    assert Cursor(tmp_path / "track.json").held("kept") == Held("drawn", 10)


def test_a_kill_before_the_note_gives_no_step_twice(tmp_path: Path) -> None:
    kept = Kept()
    kept.tells = True
    train(tmp_path, 0, 5, loss=1.0)
    feed_of(tmp_path, kept).feed(0.0)
    Cursor(tmp_path / "track.json").note("kept", Held("drawn", 3))  # as if steps 4 and 5 were not noted
    train(tmp_path, 4, 6, loss=1.0)
    feed_of(tmp_path, kept).feed(0.0)
    assert kept.steps == list(range(1, 7))


def test_a_tracker_that_fails_is_told_of_once_and_catches_up(tmp_path: Path) -> None:
    kept = Kept()
    said: list[str] = []
    kept.tells = True
    feed = feed_of(tmp_path, kept, said)
    train(tmp_path, 0, 2, loss=1.0)
    feed.feed(0.0)
    kept.broken = True
    train(tmp_path, 2, 4, loss=1.0)
    for now in (1.0, 2.0, 1.0 + feeder.FIRST_RETRY_SECONDS):
        feed.feed(now)
    (told,) = said
    assert "the login has expired" in told and "the run goes on" in told and "\n" not in told
    kept.broken = False
    train(tmp_path, 4, 6, loss=1.0)
    feed.feed(10 * feeder.FIRST_RETRY_SECONDS)
    assert kept.steps == list(range(1, 7)) and len(said) == 2 and "works again" in said[1]


def test_a_stopped_run_is_not_finished_and_gets_its_files(tmp_path: Path) -> None:
    kept = Kept()
    for name in ("plan.json", "report.html"):
        (tmp_path / name).write_text("{}")
    train(tmp_path, 0, 3, loss=1.0)
    feed_of(tmp_path, kept).close()
    assert kept.closed is False and kept.files == ["plan.json", "report.html"] and kept.steps == [1, 2, 3]


def test_how_the_machine_does_is_told_with_the_newest_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launch.track.cursor.BLOCK", 300)
    seen: dict[int, set[str]] = {}
    kept, machine = Kept(), Machine()
    monkeypatch.setattr(kept, "log", lambda step, values: seen.update({step: set(values)}))
    run = TrackedRun(tmp_path, None, "0123456789abcdef", 50, "dp=1")
    feed = Feed("kept", run, print, lambda name: kept, machine.look)
    for after, until in ((0, 40), (40, 41)):
        train(tmp_path, after, until, loss=1.0)
        time.sleep(0.05)  # the kernel counts in hundredths of a second
        for _ in range(until):  # of a file in place of another a block at a time
            feed.feed(0.0)
    told = {step for step, names in seen.items() if {"system/cpu_percent", "system/memory_used"} <= names}
    assert told == {40, 41} and len(seen) == 41
    assert Cursor(tmp_path / "track.json").held("kept").step == 41


def test_cores_and_memory_are_those_of_this_machine() -> None:
    machine, until = Machine(), time.monotonic() + 0.2
    while time.monotonic() < until:
        pass
    found = machine.look()
    assert 1 < found["system/cpu_percent"] <= 100
    assert 0 < found["system/memory_used"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_what_a_driver_says_of_its_gpus() -> None:
    found = read_gpus("0, 97, 71234\n1, [N/A], 12\n\nNo devices were found\n")
    assert found == {"gpu0_percent": 97.0, "gpu0_memory": 71234 * 2**20, "gpu1_memory": 12 * 2**20}


def test_a_tracker_that_comes_late_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.track.cursor.BLOCK", 300)
    kept = Kept()
    train(tmp_path, 0, 50, loss=1.0)
    feed_of(tmp_path, kept).feed(0.0)
    assert kept.steps == list(range(1, 51))


@pytest.mark.parametrize("content", ["", "[]", "{", '{"kept": 3}', '{"kept": {"id": 4, "step": "x"}}'])
def test_a_damaged_note_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "track.json").write_text(content)
    assert Cursor(tmp_path / "track.json").held("kept") == Held()


def test_a_row_that_is_longer_than_a_block_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.track.cursor.BLOCK", 16)
    train(tmp_path, 0, 2, loss=1.0)
    rows = NewRows(tmp_path / "metrics.jsonl", 0)
    assert [row["step"] for _ in range(2) for row in rows.read()] == [1, 2]


def test_numbers_have_the_names_of_the_metrics() -> None:
    row: dict[str, Any] = {
        "step": 3,
        "loss": 0.5,
        "grad_norm": None,
        "layout": "dp=2",
        "loss_hex": "0x1p-1",
        "early": True,
    }
    row |= {"expert_load": [1, 2], "validation": {"web": 2.0, "code": None}, "compared": {"step_s": 1.0}}
    assert values_of(row) == {"loss": 0.5, "validation/web": 2.0}


def test_the_heartbeat_is_as_old_as_the_last_step(tmp_path: Path) -> None:
    run, over = RunDirectory(tmp_path), threading.Event()
    train(tmp_path, 0, 3, loss=1.0)
    heart = threading.Thread(target=_beat, args=(run, None, over), daemon=True)
    heart.start()
    time.sleep(0.1)
    assert not (tmp_path / "heartbeat").exists()  # these steps were an earlier launcher's
    train(tmp_path, 1, 2, loss=1.0)
    over.set()
    heart.join()
    assert json.loads((tmp_path / "heartbeat").read_text()) == 2
