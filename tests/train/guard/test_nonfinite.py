"""Gradients that are not finite: skipped, tried again, or the end of the run."""

from __future__ import annotations

import math

import pytest

from shoal.train.guard.nonfinite import MOST_IN_A_ROW, NonFinite, NonFiniteGuard
from shoal.train.step import StepResult

GOOD = StepResult(loss=1.0, grad_norm=1.0, lr=0.1, updated=True)
BAD = StepResult(loss=math.nan, grad_norm=math.nan, lr=0.1, updated=False)


def never() -> StepResult:
    raise AssertionError("no second attempt was wanted")


def test_skip_goes_on_but_not_forever() -> None:
    guard = NonFiniteGuard("skip", scaled=False)
    assert guard.judge(1, GOOD, never) is GOOD
    for step in range(MOST_IN_A_ROW):
        assert guard.judge(step, BAD, never) is BAD
    with pytest.raises(NonFinite, match="in a row"):
        guard.judge(99, BAD, never)


def test_a_good_step_starts_the_count_anew() -> None:
    guard = NonFiniteGuard("skip", scaled=False)
    for step in range(3 * MOST_IN_A_ROW):
        guard.judge(step, BAD if step % 2 else GOOD, never)


def test_retry_tells_hardware_from_data() -> None:
    guard = NonFiniteGuard("retry", scaled=False)
    assert guard.judge(1, BAD, lambda: GOOD) is GOOD
    with pytest.raises(NonFinite, match="again not finite"):
        guard.judge(2, BAD, lambda: BAD)


def test_stop_stops() -> None:
    with pytest.raises(NonFinite, match="step 5"):
        NonFiniteGuard("stop", scaled=False).judge(5, BAD, never)


def test_the_loss_scales_search_is_no_fault() -> None:
    assert NonFiniteGuard("stop", scaled=True).judge(1, BAD, never) is BAD
