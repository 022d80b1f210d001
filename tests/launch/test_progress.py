"""Following a run's files: nothing twice, nothing missed, and nothing there that can end the run."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from shoal.launch.progress import Progress, Tail, fitted
from shoal.observe.flight_recorder import EVALUATE, FIRST_STEP, RESTORE, STEP, FlightRecorder
from shoal.train.run_directory import RunDirectory


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


# What goes on before there is a row.


class Clock:
    """The time that a display believes it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("shoal.launch.progress.time.monotonic", lambda: self.now)


def display(tmp_path: Path, terminal: bool = False) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    run = RunDirectory(tmp_path)
    run.plan.write_text(json.dumps({"step": {"seconds": 3540.0}}))
    return Progress(console, run, steps=300), out


ROW = {"step": 1, "loss": 5.5, "mfu": None, "tokens_per_s": 10.0, "memory_peak": 2**30, "step_s": 3000.0}


def test_a_first_step_that_takes_an_hour_is_seen_to_run_and_does_not_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    progress, out = display(tmp_path)
    with progress, FlightRecorder(progress.run.flight(0)) as flight:
        flight.enter(FIRST_STEP, 1)
        for _ in range(3600):
            progress.poll()
            clock.now += 1
        lines = out.getvalue().splitlines()
        assert lines[0] == "step      1/300  running, 11 s (predicted: 59m 00s)"
        assert 6 <= len(lines) <= 15
        progress.run.metrics.write_text(json.dumps(ROW) + "\n")
        flight.enter(STEP, 2)
        for _ in range(3600):
            progress.poll()
            clock.now += 1
    rows = out.getvalue().splitlines()[len(lines) :]
    assert sum("loss 5.5000" in row for row in rows) == 1  # a row is said once
    assert "step      2/300  running, " in rows[1]
    assert len(rows) <= 15


def test_rows_that_come_often_are_shown_every_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    progress, out = display(tmp_path)
    with progress, progress.run.metrics.open("a") as rows:
        for step in range(1, 61):
            rows.write(json.dumps({**ROW, "step": step}) + "\n")
            rows.flush()
            progress.poll()
            clock.now += 1
    assert [line.split("/")[0].split()[-1] for line in out.getvalue().splitlines()] == [
        "12",
        "23",
        "34",
        "45",
        "56",
    ]


def test_a_terminal_shows_it_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    progress, out = display(tmp_path, terminal=True)
    with progress, FlightRecorder(progress.run.flight(0)) as flight:
        clock.now += 2
        progress.poll()
        assert "starting, 2 s" in out.getvalue()
        flight.enter(FIRST_STEP, 1)
        for _ in range(100):
            clock.now += 0.05
            progress.poll()
        assert "step      1/300  running, 4 s (predicted: 59m 00s)" in out.getvalue()
        assert out.getvalue().count("running, ") <= 6
        progress.run.metrics.write_text(json.dumps(ROW) + "\n")
        clock.now += 1
        flight.enter(STEP, 2)
        progress.poll()
        shown = out.getvalue()
        assert "loss 5.5000" in shown and "step      2" not in shown
        clock.now += 11
        progress.poll()
        assert "step      2/300  running, 11 s" in out.getvalue()


def test_a_colour_is_that_of_its_own_line(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system="standard")
    progress = Progress(console, RunDirectory(tmp_path), steps=300)
    with progress:
        progress.run.metrics.write_text(json.dumps(ROW) + "\n")
        progress.poll()
        progress.say("a validation loss", "green")
    assert "\x1b[32ma validation loss\x1b[0m" in out.getvalue()
    assert "loss 5.5000" in out.getvalue() and "\x1b[32mstep" not in out.getvalue()


def test_a_record_of_an_earlier_launcher_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with FlightRecorder(RunDirectory(tmp_path).flight(0)) as old:
        old.enter(STEP, 77)
        progress, _ = display(tmp_path)
        clock.now += 20
        progress.poll()
        assert progress.waiting(clock.now) == "starting, 20 s"
    with FlightRecorder(progress.run.flight(0)) as new:
        new.enter(RESTORE, 0)
        progress.poll()
        clock.now += 5
        assert progress.waiting(clock.now) == "reading weights, 5 s"


def test_what_takes_long_is_told_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    progress, _ = display(tmp_path)
    progress.compiles = True
    with progress, FlightRecorder(progress.run.flight(0)) as flight:
        flight.enter(FIRST_STEP, 1)
        progress.poll()
        clock.now += 40
        assert "step      1/300  compiling and running, 40 s" in progress.waiting(clock.now)
        flight.enter(EVALUATE, 10)
        progress.poll()
        clock.now += 12
        flight.enter(EVALUATE, 10, 3, 16)
        progress.poll()
        assert progress.waiting(clock.now) == "evaluating 3/16, 12 s"


def test_a_line_has_rate_and_norm_and_fits_a_narrow_terminal(tmp_path: Path) -> None:
    progress, _ = display(tmp_path)
    row = {**ROW, "lr": 0.0003, "grad_norm": 1.2345, "mfu": 0.4, "step_s": 2.0}
    progress.run.metrics.write_text(json.dumps(row) + "\n")
    with progress:
        progress.poll()
    line = progress.line()
    assert "  ".join(line) == (
        "step      1/300  loss 5.5000  lr 0.0003  gradient 1.23  10 tokens/s  MFU 40 %  memory 1,024 MiB  ETA 9m 58s"
    )
    assert "  ".join(fitted(line, 80)) == (
        "step      1/300  loss 5.5000  lr 0.0003  gradient 1.23  10 tokens/s  ETA 9m 58s"
    )


def test_a_step_has_one_line_on_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is notable of it stands in that line, and not in lines of its own that name the step again."""
    clock = Clock(monkeypatch)
    progress, out = display(tmp_path)
    sample = {"step": 8, "prompt": "Once", "text": "there was"}
    compared = {"step_s": 0.4, "predicted_step_s": 0.3, "step_s_error": -0.25, "rates": "measured"}
    with progress, progress.run.metrics.open("a") as rows:
        for step in range(1, 13):
            notable = {"heldout_loss": 2.0, "compared": compared} if step == 8 else {}
            rows.write(json.dumps({**ROW, "step": step, **notable}) + "\n")
            rows.flush()
            if step == 8:
                progress.run.samples.write_text(json.dumps(sample) + "\n")
            progress.poll()
            clock.now += 2
    lines = out.getvalue().splitlines()
    assert [line.split("/")[0].split()[-1] for line in lines if line.startswith("step")] == ["7", "8"]
    said = "validation loss 2.0000 nats/token; predicted 0.3 s/step, measured 0.4 (-25.0%; rates: measured)"
    assert lines[1].startswith("step      8/300  loss 5.5000") and lines[1].endswith(said)
    assert lines[2] == "  sample: 'Once' → 'there was'"
    late = {**sample, "step": 11}
    with progress, progress.run.samples.open("a") as more:
        more.write(json.dumps(late) + "\n")
        more.flush()
        progress.poll()
    assert "  sample of step 11: " in out.getvalue()
