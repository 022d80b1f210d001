"""What a visit to a layout is worth, against sums over the two normal distributions themselves."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from shoal.launch.tuning.belief import LEAST_SPREAD, Belief, chance_slower, expected_saving, measured

POINTS = 400


def summed(best: Belief, other: Belief) -> tuple[float, float]:
    """The same by adding up over a grid of quantiles of both."""
    mine, theirs = (
        [NormalDist(one.seconds, one.spread).inv_cdf((n + 0.5) / POINTS) for n in range(POINTS)]
        for one in (best, other)
    )
    pairs = [(a, b) for a in mine for b in theirs]
    return sum(max(0.0, a - b) for a, b in pairs) / len(pairs), sum(b > a for a, b in pairs) / len(pairs)


@pytest.mark.parametrize(
    "best,other",
    [
        (Belief(1.0, 0.05), Belief(1.0, 0.2)),
        (Belief(1.0, 0.02), Belief(0.8, 0.1)),
        (Belief(1.0, 0.1), Belief(1.4, 0.3)),
        (Belief(0.2, 0.01), Belief(0.5, 0.05)),
    ],
)
def test_saving_and_chance(best: Belief, other: Belief) -> None:
    saving, slower = summed(best, other)
    assert expected_saving(best, other) == pytest.approx(saving, rel=0.02, abs=1e-4)
    assert chance_slower(best, other) == pytest.approx(slower, abs=0.01)


def test_without_any_doubt_the_difference_is_all() -> None:
    certain, faster = Belief(1.0, 0.0), Belief(0.75, 0.0)
    assert expected_saving(certain, faster) == 0.25 and chance_slower(certain, faster) == 0.0
    assert expected_saving(faster, certain) == 0.0 and chance_slower(faster, certain) == 1.0


def test_a_step_that_was_held_up_changes_little() -> None:
    steady = measured([1.0, 1.01, 0.99, 1.0, 1.02])
    disturbed = measured([1.0, 1.01, 0.99, 1.0, 30.0])
    assert disturbed.seconds == steady.seconds == 1.0
    assert disturbed.spread <= 2 * steady.spread


def test_more_visits_say_more_down_to_what_two_days_differ_by() -> None:
    once, thrice = (measured([0.9, 1.0, 1.1], visits) for visits in (1, 3))
    assert once.spread == pytest.approx(0.1 * 1.4826) and thrice.spread == pytest.approx(
        once.spread / math.sqrt(3)
    )
    assert measured([0.9, 1.0, 1.1] * 30).spread == pytest.approx(once.spread)  # all of the same minute
    assert measured([1.0] * 30, 3).spread == LEAST_SPREAD
