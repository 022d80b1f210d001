"""What one search measures, the next one of the same work begins with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.facts import calibration
from shoal.facts.calibration import file, steps
from shoal.facts.config.file import load
from shoal.facts.layout import Layout
from shoal.launch.tuning.candidates import Tried, candidates
from shoal.launch.tuning.expected import OF_ANOTHER_RUN, expected, known_steps, remember
from shoal.launch.tuning.trials import Trial, Trials
from shoal.plan.resolve import Job, resolve

Settings = Callable[..., list[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(file.VARIABLE, str(tmp_path / "cached"))
    return file.default_folder()


def job(settings: Settings, layout: str = "auto", **overrides: object) -> Job:
    options = {"cluster__on": "4xcpu", "recipe__steps": 50, **overrides}
    return resolve(load(None, settings(**options), layout).config)


def tried(of: Job, **seconds: float) -> Trials:
    """A search that found these."""
    trials = [Trial(name.replace("_", "="), 0.1, 0.2, planned=0.1) for name in seconds]
    for trial, found in zip(trials, seconds.values(), strict=True):
        trial.samples = [found] * 4
    return Trials(trials, of.config.recipe.steps)


def test_the_next_search_begins_in_the_fastest(settings: Settings, folder: Path) -> None:
    first = job(settings)
    assert str(first.layout) == "dp=4" and known_steps(first) == {}
    remember(first, tried(first, dp_4=0.5, fsdp_4=0.3))
    assert known_steps(first) == {}  # nothing is read by itself
    assert file.use(folder) == []
    assert [(name, one.seconds) for name, one in known_steps(first).items()] == [
        ("fsdp=4", 0.3),
        ("dp=4", 0.5),
    ]
    found, _ = candidates(first, Tried(), lambda one: None)
    assert str(found[0].layout) == "fsdp=4"
    named = job(settings, "dp=4")
    begun, _ = candidates(named, Tried(), lambda one: None)
    assert str(begun[0].layout) == "dp=4"  # as it was asked to
    # Measured here five times as long as planned, and three times: four times is expected of the others.
    one, two, other = expected([*begun[:1], *found[:1], job(settings, "dp=2,pp=2")])
    assert (one.predicted, one.error_bar, two.predicted) == (0.5, OF_ANOTHER_RUN, 0.3)
    assert other.predicted == pytest.approx(4 * other.planned) and other.error_bar > OF_ANOTHER_RUN
    calibration.forget()
    assert known_steps(first) == {}


def test_other_work_has_other_steps(settings: Settings, folder: Path) -> None:
    first = job(settings)
    remember(first, tried(first, dp_4=0.5))
    file.use(folder)
    same = {
        "recipe__lr": 0.5,
        "recipe__seed": 9,
        "recipe__steps": 80,
        "checkpoint__every": 7,
        "tune__search": True,
    }
    other = {"recipe__seq": 16, "run__strict": True, "recipe__batch": 16, "cluster__on": "2xcpu"}
    assert all(known_steps(job(settings, **{key: value})) for key, value in same.items())
    assert not any(known_steps(job(settings, **{key: value})) for key, value in other.items())


def test_the_last_measurement_counts_and_a_broken_file_is_replaced(settings: Settings, folder: Path) -> None:
    first = job(settings)
    for seconds in (0.5, 0.4):
        remember(first, tried(first, dp_4=seconds))
    file.use(folder)
    assert [one.seconds for one in known_steps(first).values()] == [0.4]
    path = file.steps_file(folder, "cpu")
    path.write_text("{")
    (warning,) = file.use(folder)
    assert "run shoal tune, or delete the file" in warning and known_steps(first) == {}
    remember(first, tried(first, dp_4=0.3))
    assert file.use(folder) == [] and len(known_steps(first)) == 1
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_does_not_grow_forever() -> None:
    def one(number: int) -> steps.MeasuredStep:
        return steps.MeasuredStep(
            work=str(number),
            model="m",
            cluster="c",
            layout=str(Layout()),
            seconds=1,
            predicted=1,
            samples=4,
            date="",
        )

    stored = steps.StoredSteps(format=1, device="cpu").with_more([one(n) for n in range(steps.MOST + 5)])
    assert [stored.steps[0].work, len(stored.steps)] == ["5", steps.MOST]
