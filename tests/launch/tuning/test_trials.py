"""Which layouts are visited and which one is kept, in runs that are made up: seconds of every step are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from shoal.launch.tuning.account import account
from shoal.launch.tuning.trials import MOST_VISITS, SAMPLES, VISIT, WARM_UP, LayoutMove, Trial, Trials

MOVE = 2.0


@dataclass
class Imagined:
    """A run whose steps take as long as it says; moves take ``MOVE`` seconds, and the first step of each ten times."""

    seconds: dict[str, float]
    predicted: dict[str, float]
    steps: int = 1000
    noise: float = 0.03
    error_bar: float = 0.2
    visited: list[str] = field(default_factory=list)

    def run(self) -> Trials:
        draw = random.Random(7)
        trials = Trials(
            [Trial(name, self.predicted[name], self.error_bar) for name in self.seconds], self.steps
        )
        here, attempt, fresh = trials.first.layout, 0, True
        self.visited = [here]
        for step in range(1, self.steps + 1):
            seconds = self.seconds[here] * (10 if fresh else 1) * draw.uniform(1 - self.noise, 1 + self.noise)
            trials.add(step, here, str(attempt), seconds)
            fresh = False
            choice = trials.next()
            if choice is None:
                continue
            if choice.final:
                trials.decided = choice
            if choice.layout != here:
                trials.moved(LayoutMove(step, here, choice.layout, MOVE))
                here, attempt, fresh = choice.layout, attempt + 1, True
                self.visited.append(here)
        return trials


def test_from_a_bad_first_layout_it_ends_in_the_fastest() -> None:
    seconds = {"bad": 2.0, "good": 0.9, "best": 0.7, "poor": 1.5}
    run = Imagined(seconds, predicted={"bad": 1.6, "good": 0.8, "best": 0.85, "poor": 0.9})
    trials = run.run()
    assert trials.decided is not None and trials.decided.layout == run.visited[-1] == "best"
    assert sum(trial.steps for trial in trials.of.values()) == trials.step == run.steps
    found = account(trials)
    assert found["chosen"] == "best" and found["gain"]["expected_s"] == 0
    saved = sum((2.0 - seconds[name]) * trial.steps for name, trial in trials.of.items())
    assert found["gain"]["saved_s"] == pytest.approx(saved, rel=0.05)
    assert found["cost"]["moves_s"] == MOVE * (len(run.visited) - 1)
    slow = sum(9 * seconds[name] for name in run.visited[1:])
    assert found["cost"]["warm_up_s"] == pytest.approx(slow, rel=0.1)
    assert found["cost"]["slower_steps_s"] == 0
    assert found["net_s"] == pytest.approx(saved - slow - MOVE * (len(run.visited) - 1), rel=0.1)


def test_what_is_slower_than_the_first_is_a_cost() -> None:
    run = Imagined({"first": 1.0, "second": 1.3}, predicted={"first": 1.0, "second": 1.0})
    trials = run.run()
    assert run.visited == ["first", "second", "first"] and trials.decided is not None
    found = account(trials)
    assert found["gain"] == {"saved_s": 0, "expected_s": 0} and found["net_s"] < 0
    assert found["cost"]["slower_steps_s"] == pytest.approx(0.3 * trials.of["second"].steps, rel=0.2)


def test_a_visit_that_does_not_pay_is_not_made() -> None:
    """The same layouts, in a run with so few steps left that a move costs more than it could save."""
    seconds, predicted = {"first": 0.1, "second": 0.08}, {"first": 0.1, "second": 0.09}
    long, short = (Imagined(seconds, predicted, steps) for steps in (20_000, 40))
    assert long.run().decided is not None and long.visited == ["first", "second"]
    trials = short.run()
    assert short.visited == ["first"] and trials.decided is not None
    assert "cost more" in trials.decided.why


def test_what_is_predicted_far_slower_is_not_tried() -> None:
    run = Imagined({"first": 1.0, "slow": 3.0}, predicted={"first": 1.0, "slow": 3.0}, error_bar=0.1)
    run.run()
    assert run.visited == ["first"]


def test_predictions_that_are_all_wrong_by_the_same_factor_mislead_no_one() -> None:
    run = Imagined({"first": 10.0, "slow": 30.0}, predicted={"first": 1.0, "slow": 3.0}, error_bar=0.1)
    run.run()
    assert run.visited == ["first"]  # with 3 seconds of a step it would look like the fastest


def test_equal_layouts_are_given_up_after_some_visits() -> None:
    run = Imagined({"a": 1.0, "b": 1.0}, predicted={"a": 1.0, "b": 1.0}, steps=10**5, noise=0.2)
    trials = run.run()
    assert trials.decided is not None
    assert max(trial.visits for trial in trials.of.values()) <= MOST_VISITS + 1  # the last to stay


def test_a_move_back_that_does_not_pay_is_not_made() -> None:
    """The visit was worth it, the best is another one by a hair, and the way back costs more than that hair."""
    trials = Trials([Trial("a", 1.0, 0.2), Trial("b", 1.0, 0.2)], 100)
    for step, (layout, seconds) in enumerate([("a", 1.0)] * VISIT + [("b", 1.01)] * VISIT, start=1):
        trials.add(step, layout, layout, seconds)
    trials.moved(LayoutMove(VISIT, "a", "b", 50.0))
    choice = trials.next()
    assert choice is not None and choice.final and choice.layout == "b" and "would save" in choice.why


def test_samples_are_steps_after_the_first_of_a_process_and_of_the_whole_batch() -> None:
    trials = Trials([Trial("a", 1.0, 0.2), Trial("b", 1.0, 0.2)], 100)
    rows = [9.0] * WARM_UP + [1.0] * (SAMPLES - 1)
    for step, seconds in enumerate(rows, start=1):
        trials.add(step, "a", "one", seconds)
    trials.add(len(rows) + 1, "a", "one", 0.2, comparable=False)  # of a ramp's smaller batch
    assert trials.next() is None and trials.of["a"].samples == [1.0] * (SAMPLES - 1)
    for step in range(1, WARM_UP + 1):  # a fault; the workers start anew
        trials.add(len(rows) + 1 + step, "a", "two", 9.0)
    assert trials.next() is None and trials.of["a"].warm_ups == [[9.0] * WARM_UP]
    trials.add(50, "a", "two", 1.0)
    assert trials.next() is not None


def test_a_layout_that_failed_is_not_visited_again() -> None:
    trials = Trials([Trial("a", 1.0, 0.2), Trial("b", 0.1, 0.2), Trial("c", 0.9, 0.2)], 10**6)
    for step in range(1, VISIT + 1):
        trials.add(step, "a", "one", 1.0)
    choice = trials.next()
    assert choice is not None and choice.layout == "b"
    assert trials.fall_back("b") == "a"
    trials.fail("b", "out of memory")
    choice = trials.next()
    assert choice is not None and choice.layout == "c"
    assert trials.fall_back("a") == "c"
    trials.fail("c", "no")
    assert trials.fall_back("a") is None
