"""Rows beside the checkpoints of a store: whichever machine the first rank is on, it has all of them once."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Train, after_steps

from shoal.launch.report import FINISHED, STOPPED
from shoal.train.checkpoint import stored_rows
from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.checkpoint.stored_rows import StoredRows
from shoal.train.files import StepFile, read_rows


def row(step: int, by: str) -> dict[str, Any]:
    return {"step": step, "by": by}


class Machine:
    """The first rank on one of several machines, each with a disk of its own."""

    def __init__(self, store: ObjectStore, folder: Path, done: int) -> None:
        folder.mkdir(exist_ok=True)
        self.name, self.file, self.step = folder.name, folder / "metrics.jsonl", done
        self.rows = StoredRows(store, self.file)
        self.rows.bring(done)
        self.metrics = StepFile(self.file, done)
        self.rows.begin()

    def train(self, steps: int, commit: bool = True) -> None:
        for _ in range(steps):
            self.step += 1
            self.metrics.append(row(self.step, self.name))
        if commit:
            self.rows.add()


def test_the_first_rank_moves_between_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "MOST_PARTS", 3)
    store = ObjectStore(f"file://{tmp_path}/store/run")
    a = Machine(store, tmp_path / "a", 0)
    a.train(5)
    a.train(5)
    a.train(2, commit=False)  # and is lost
    b = Machine(store, tmp_path / "b", 10)
    assert [one["step"] for one in read_rows(b.file)] == list(range(1, 11))
    b.train(4)  # one more than was committed, which is step 13
    again = Machine(store, tmp_path / "a", 13)
    assert read_rows(again.file) == [row(step, "a" if step <= 10 else "b") for step in range(1, 14)]
    again.train(1)
    again.train(1)
    last = Machine(store, tmp_path / "c", 15)
    assert [one["by"] for one in read_rows(last.file)] == ["a"] * 10 + ["b"] * 3 + ["a"] * 2
    assert store.notes() == ["metrics-00000001-00000015.jsonl"]
    assert Machine(store, tmp_path / "d", 0).file.read_text() == "" and store.notes() == []


def test_a_run_whose_directory_is_lost_has_its_whole_curve(train: Train, tmp_path: Path) -> None:
    options = {
        "recipe__steps": 300,
        "recipe__schedule": "constant",
        "checkpoint__to": f"file://{tmp_path}/store",
    }
    with after_steps(tmp_path / "run", 3, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        stopped = train(**options)
    assert stopped.report.code == STOPPED and 3 <= len(stopped.rows) < 300
    shutil.rmtree(tmp_path / "run")
    again = train(**options)
    assert again.report.code == FINISHED and [row["step"] for row in again.rows] == list(range(1, 301))
    assert again.rows[: len(stopped.rows)] == stopped.rows
