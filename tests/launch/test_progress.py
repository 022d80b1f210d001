"""Following a run's files: nothing twice, nothing missed, and nothing there that can end the run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from shoal.launch.progress import Tail
from shoal.train.rundir import RunDirectory


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def write(file: Path, *steps: int) -> None:
    with file.open("a") as out:
        out.writelines(json.dumps({"step": step}) + "\n" for step in steps)


def steps(tail: Tail) -> list[int]:
    return [row["step"] for row in tail.read()]


def test_rows_are_shown_once_and_torn_ones_when_they_are_whole(file: Path) -> None:
    tail = Tail(file, 0)
    assert steps(tail) == []
    write(file, 1, 2)
    with file.open("a") as out:
        out.write('{"step"')
    assert steps(tail) == [1, 2]
    with file.open("a") as out:
        out.write(": 3}\n")
    assert steps(tail) == [3]


def test_several_rows_of_a_step_may_come_one_by_one(file: Path) -> None:
    tail = Tail(file, 0)
    write(file, 5)
    assert steps(tail) == [5]
    write(file, 5)
    assert steps(tail) == [5]


def test_a_resumed_run_shows_what_comes_after_its_commit(file: Path) -> None:
    write(file, 1, 2, 3, 4, 5)
    tail = Tail(file, 3)
    assert steps(tail) == [4, 5]


def test_a_replaced_file_is_not_shown_again(file: Path) -> None:
    tail = Tail(file, 0)
    write(file, 1, 2, 3, 4)
    assert steps(tail) == [1, 2, 3, 4]
    new = file.with_suffix(".new")
    write(new, 1, 2, 3)
    new.rename(file)
    write(file, 4, 5)
    assert steps(tail) == [5]


def test_a_line_that_is_no_row_is_passed_over(file: Path) -> None:
    file.write_text('{"step": 1\n[]\nnull\n{"other": 1}\n{"step": 2}\n')
    assert steps(Tail(file, 0)) == [2]
    assert Tail(file.parent, 0).read() == []


def test_a_torn_fault_does_not_swallow_the_next(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.note_fault(kind="restart", attempt=1)
    with run.faults.open("a") as out:
        out.write('{"time": 1, "ki')
    run.note_fault(kind="restart", attempt=2)
    rows = Tail(run.faults, 0, since=time.time() - 60).read()
    assert [row["attempt"] for row in rows] == [1, 2]
    assert Tail(run.faults, 0, since=time.time() + 60).read() == []
