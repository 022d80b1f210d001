"""A run that tunes itself is the run that it would have been in one layout, and ends in the fastest of those tried."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from rich.console import Console
from tests.conftest import Run, Train, after_steps
from tests.launch.tuning import failing

from shoal.facts.config.file import load
from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput
from shoal.launch import local
from shoal.launch.report import FINISHED, STOPPED
from shoal.launch.tuning.candidates import Tried
from shoal.launch.tuning.trials import VISIT, WARM_UP
from shoal.plan.resolve import resolve
from shoal.train.files import read_rows
from shoal.train.run_directory import RunDirectory

# So many that every visit pays, however busy the machine: the run is stopped long before.
MANY = 2_000
STRICT = {
    "run__strict": True,
    "recipe__steps": MANY,
    "recipe__warmup": 2,
    "cluster__on": "4xcpu",
    "checkpoint__every": 0,
    "fault__timeout": 60,
}
LAYOUTS = ("fsdp=2,pp=2,recompute=full", "fsdp=4", "dp=4")

Tune = Callable[..., Run]


@pytest.fixture
def tune(settings: Callable[..., list[str]], tmp_path: Path) -> Tune:
    def run(name: str, *layouts: str, entrypoint: str | None = None, **overrides: Any) -> Run:
        job = resolve(load(None, settings(**overrides), layouts[0]).config)
        tried = Tried(tuple(map(Layout.parse, layouts)))
        directory = RunDirectory(tmp_path / name)
        return Run(local.train(job, directory, False, Console(stderr=True), None, entrypoint, tried))

    return run


@contextmanager
def stopped_when(condition: Callable[[], bool]) -> Iterator[None]:
    """This process is asked to stop, as by a scheduler, once that is so."""
    over = threading.Event()

    def wait() -> None:
        while not over.is_set():
            if condition():
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def settled(run: Path) -> bool:
    """Whether a layout was chosen, and two steps are done in it."""
    chosen = [row["layout"] for row in read_rows(run / "tuning.jsonl") if row["kind"] == "decided"]
    rows = read_rows(run / "metrics.jsonl")
    return bool(chosen) and [row["layout"] for row in rows[-2:]] == chosen * 2


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of each layout's steps, without the first of each process."""
    found: dict[str, list[float]] = {}
    seen: dict[str, int] = {}
    for row in rows:
        seen[row["attempt"]] = seen.get(row["attempt"], 0) + 1
        if seen[row["attempt"]] > WARM_UP:
            found.setdefault(row["layout"], []).append(row["step_s"])
    return {layout: median(times) for layout, times in found.items()}


def kinds(run: Run, *wanted: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run.directory.tuning) if row["kind"] in wanted]


def check_same_run(tuned: Run, train: Train, tmp_path: Path, **options: Any) -> None:
    """Every step once, and to the bit the losses of one process."""
    assert [row["step"] for row in tuned.rows] == list(range(1, len(tuned.rows) + 1))
    with after_steps(tmp_path / "alone", len(tuned.rows), lambda: os.kill(os.getpid(), signal.SIGTERM)):
        alone = train("alone", "dp=1", **options)
    assert alone.report.code == STOPPED
    assert tuned.hexes == alone.hexes[: len(tuned.hexes)]


@pytest.mark.long
def test_from_a_bad_first_layout_to_the_fastest(tune: Tune, train: Train, tmp_path: Path) -> None:
    with stopped_when(lambda: settled(tmp_path / "tuned")):
        tuned = tune("tuned", *LAYOUTS, **STRICT)
    assert tuned.report.code == STOPPED, tuned.report.message
    check_same_run(tuned, train, tmp_path, **STRICT)
    found = tuned.report.tuning
    assert found is not None and found["first"] == f"{LAYOUTS[0].replace('pp=2', 'pp=2,micro=1')}"
    tried = [row for row in found["layouts"] if row["measured_step_s"]]
    assert len(tried) == len(LAYOUTS)  # with so many steps left each is worth a visit
    (decided,) = kinds(tuned, "decided")
    until = [row for row in tuned.rows if row["step"] <= decided["step"]]
    times = medians(until)
    assert found["chosen"] == decided["layout"] == min(times, key=lambda name: times[name])
    assert tuned.rows[-1]["layout"] == found["chosen"] != found["first"]
    assert {row["layout"]: row["measured_step_s"] for row in tried} == pytest.approx(times)
    # What was asked for has happened, and what it took is told.
    asked = [(row["from"], row["to"]) for row in kinds(tuned, "move")]
    assert asked == [(row["from"], row["to"]) for row in found["moves"]]
    assert found["cost"]["moves_s"] == pytest.approx(sum(row["seconds"] for row in kinds(tuned, "moved")))
    changes = [
        (before["step"], before["layout"], row["layout"])
        for before, row in zip(tuned.rows, tuned.rows[1:], strict=False)
        if before["layout"] != row["layout"]
    ]
    assert changes == [(row["after_step"], row["from"], row["to"]) for row in found["moves"]]
    # From now on it is the run's own.
    assert tuned.directory.read_plan()["layout"] == found["chosen"]
    assert load(tuned.directory.config).config.layout == found["chosen"]
    assert not tuned.directory.faults.exists() or "restart" not in tuned.directory.faults.read_text()


@pytest.mark.long
def test_the_choice_is_the_fastest_as_measured_alone(tune: Tune, train: Train, tmp_path: Path) -> None:
    """Each is run by itself, in turns. What a busy machine adds to all of them in one turn is not judged."""
    with stopped_when(lambda: settled(tmp_path / "tuned")):
        tuned = tune("tuned", *LAYOUTS, **STRICT)
    alone: dict[str, list[float]] = {}
    for turn in range(2):
        for number, layout in enumerate(LAYOUTS):
            rows = train(f"{number}-{turn}", layout, **{**STRICT, "recipe__steps": 20}).rows
            alone.setdefault(rows[0]["layout"], []).append(medians(rows)[rows[0]["layout"]])
    fastest = min(min(times) for times in alone.values())
    assert tuned.report.tuning is not None
    assert min(alone[tuned.report.tuning["chosen"]]) <= 1.2 * fastest, alone


@pytest.mark.long
def test_a_killed_launcher_goes_on_with_what_was_measured(
    tune: Tune, train: Train, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    run, options = tmp_path / "killed", {**STRICT, "checkpoint__every": 2}
    words = [word for one in settings(**options) for word in ("--set", one)]
    command = [
        sys.executable,
        "-m",
        "shoal",
        "tune",
        "--run",
        str(run),
        "--layouts",
        ";".join(LAYOUTS),
        *words,
    ]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        # In the midst of a move.
        while "move" not in [row["kind"] for row in read_rows(run / "tuning.jsonl")]:
            assert launcher.poll() is None, launcher.communicate()[1]
            time.sleep(0.02)
    finally:
        launcher.kill()
        launcher.communicate()
    (asked,) = [row for row in read_rows(run / "tuning.jsonl") if row["kind"] == "move"]
    with stopped_when(lambda: settled(run)):
        tuned = tune("killed", *LAYOUTS, **options)
    assert tuned.report.code == STOPPED, tuned.report.message
    check_same_run(tuned, train, tmp_path, **STRICT)
    assert len(kinds(tuned, "begin")) == 1
    # The move is made by the next launcher, and not asked for again.
    assert [row["to"] for row in kinds(tuned, "moved", "move")[:2]] == [asked["to"]] * 2
    assert kinds(tuned, "moved", "move")[1]["kind"] == "moved"
    (decided,) = kinds(tuned, "decided")
    found = {row["layout"]: row["measured_step_s"] for row in decided["layouts"] if row["samples"]}
    assert found == pytest.approx(medians([row for row in tuned.rows if row["step"] <= decided["step"]]))
    assert len({row["attempt"].partition("-")[0] for row in tuned.rows}) == 2  # steps of both launchers


def test_a_layout_that_does_not_run_here_is_dropped(tune: Tune, tmp_path: Path) -> None:
    options = {**STRICT, "cluster__on": "2xcpu"}
    with stopped_when(lambda: settled(tmp_path / "dropped")):
        tuned = tune("dropped", "pp=2", "fsdp=2", "dp=2", entrypoint=f"{failing.__name__}:work", **options)
    assert tuned.report.code == STOPPED, tuned.report.message
    assert {row["layout"] for row in tuned.rows} == {"pp=2,micro=1", "dp=2,micro=1"}
    assert [row["step"] for row in tuned.rows] == list(range(1, len(tuned.rows) + 1))
    (failed,) = kinds(tuned, "failed")
    assert failed["layout"] == "fsdp=2,micro=1" and failing.UNABLE in failed["why"]
    faults = [json.loads(line) for line in tuned.directory.faults.read_text().splitlines()]
    assert faults[0]["kind"] == "error" and "is not tried again; going on in" in faults[0]["action"]
    assert tuned.report.tuning is not None and tuned.report.tuning["chosen"] != "fsdp=2,micro=1"


def test_a_short_run_stays_where_it_is_and_is_over_when_it_is_over(tune: Tune) -> None:
    options = {"recipe__steps": 2 * VISIT, "cluster__on": "2xcpu"}
    tuned = tune("short", "fsdp=2", "dp=2", **options)
    assert tuned.report.code == FINISHED and len(tuned.rows) == 2 * VISIT
    found = tuned.report.tuning
    assert found is not None and found["moves"] == [] and found["chosen"] == "fsdp=2"
    assert "cost more than expected to save" in found["why"] and found["net_s"] == 0
    again = tune("short", "fsdp=2", "dp=2", **options)
    assert again.report.code == FINISHED and again.rows == tuned.rows
    assert again.report.tuning is not None and again.report.tuning["chosen"] == "fsdp=2"
    with pytest.raises(BadInput, match="too few to try layouts: two of them take 6 steps"):
        tune("shorter", "fsdp=2", "dp=2", **{**options, "recipe__steps": 2 * VISIT - 1})


@pytest.mark.long
def test_a_run_is_tuned_from_where_it_stands_and_stays_in_what_was_chosen(
    tune: Tune, train: Train, tmp_path: Path
) -> None:
    options = {"recipe__steps": 40, "cluster__on": "2xcpu"}
    with after_steps(tmp_path / "late", 5, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        begun = train("late", "dp=2", **options)
    assert begun.report.code == STOPPED
    with stopped_when(lambda: settled(tmp_path / "late")):
        tuned = tune("late", "fsdp=2", "dp=2", **options)
    assert tuned.report.tuning is not None
    assert sum(row["steps"] for row in tuned.report.tuning["layouts"]) == len(tuned.rows) - len(begun.rows)
    assert kinds(tuned, "begin")[0]["step"] == len(begun.rows)
    chosen = tuned.report.tuning["chosen"]
    assert chosen and {row["layout"] for row in tuned.rows[: len(begun.rows)]} == {"dp=2"}
    # Whatever the search is told to begin in: it is over.
    ended = tune("late", "dp=2" if chosen == "fsdp=2" else "fsdp=2", chosen, **options)
    assert ended.report.code == FINISHED and len(ended.rows) == 40
    assert {row["layout"] for row in ended.rows[len(tuned.rows) :]} <= {chosen}
    assert [row["step"] for row in ended.rows] == list(range(1, 41)) and len(kinds(ended, "decided")) == 1


def test_auto_with_search_tries_what_the_plan_cannot_tell_apart(train: Train) -> None:
    options = {"recipe__steps": 2 * VISIT, "cluster__on": "2xcpu"}
    tuned = train("auto", "auto", tune__search=True, **options)
    assert tuned.report.code == FINISHED and tuned.report.tuning is not None
    (begun,) = kinds(tuned, "begin")
    layouts = [row["layout"] for row in begun["layouts"]]
    assert layouts[0] == tuned.rows[0]["layout"] == "dp=2" and 2 <= len(set(layouts)) <= 4
    fastest = min(row["predicted_step_s"] for row in begun["layouts"])
    within = max(row["error_bar"] for row in begun["layouts"])
    assert all(row["predicted_step_s"] <= fastest * (1 + within) for row in begun["layouts"])
    # A layout that is named is the one that is trained.
    named = train("named", "dp=2", tune__search=True, **options)
    assert named.report.tuning is None and not named.directory.tuning.exists()
