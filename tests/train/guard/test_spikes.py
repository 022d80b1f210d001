"""Spikes of the loss and of the gradient: what is one, what is done about it, and that a resumed run judges alike."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from shoal.train.guard.spikes import FEWEST, WINDOW, SpikeGuard

FACTOR = 10.0


def steps(count: int, seed: int = 0) -> list[tuple[float, float]]:
    """Losses and norms of a run that goes well: falling, with noise."""
    drawn = random.Random(seed)
    return [
        (2 + 3 * math.exp(-step / 50) + drawn.gauss(0, 0.05), 1 + drawn.lognormvariate(-1, 0.4))
        for step in range(count)
    ]


def fed(guard: SpikeGuard, numbers: list[tuple[float, float]], first: int = 1) -> list[dict[str, Any]]:
    rows = [guard.judge(step, loss, norm) for step, (loss, norm) in enumerate(numbers, first)]
    return [row for row in rows if row is not None]


@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_goes_well(seed: int) -> None:
    guard = SpikeGuard(FACTOR, "skip")
    for step, (loss, norm) in enumerate(steps(500, seed), 1):
        assert not guard.refuses(norm)
        assert guard.judge(step, loss, norm) is None


def test_a_spike_of_the_loss_is_told() -> None:
    guard = SpikeGuard(FACTOR)
    fed(guard, steps(300))
    row = guard.judge(301, 4.0, 1.4)
    assert row is not None
    assert (row["kind"], row["step"], row["of"], row["loss"]) == ("spike", 301, "loss", 4.0)
    assert row["usual"] == pytest.approx(2.0, abs=0.05)
    assert row["deviations"] == pytest.approx((4.0 - row["usual"]) / 0.05, rel=0.4)
    assert row["action"] == f"loss 4, usually {row['usual']:.4g} ({row['deviations']:.0f} deviations above)"
    assert json.loads(json.dumps(row)) == row
    assert guard.judge(302, 2.0, 1.4) is None


def test_a_low_loss_is_no_spike() -> None:
    guard = SpikeGuard(FACTOR)
    fed(guard, steps(300))
    assert guard.judge(301, 0.01, 0.01) is None


def test_a_few_outliers_do_not_hide_the_next() -> None:
    guard = SpikeGuard(FACTOR)
    fed(guard, steps(300))
    for step in range(301, 311):
        assert guard.judge(step, 5.0, 1.4) is not None


def test_a_new_level_becomes_the_usual_one() -> None:
    guard = SpikeGuard(FACTOR, "skip")
    fed(guard, [(2.0, 1.0)] * WINDOW)
    told = fed(guard, [(3.0, 9.0)] * WINDOW)
    assert WINDOW // 2 <= len(told) <= WINDOW // 2 + 1
    assert not guard.refuses(9.0)


def test_nothing_is_judged_too_early() -> None:
    guard = SpikeGuard(FACTOR, "skip")
    assert fed(guard, [(2.0, 1.0)] * (FEWEST - 1)) == []
    assert not guard.refuses(1000.0)
    assert guard.judge(FEWEST, 1000.0, 1000.0) is None
    assert guard.refuses(1000.0)


def test_numbers_that_hardly_differ() -> None:
    guard = SpikeGuard(FACTOR)
    fed(guard, [(2.0, 1.0)] * WINDOW)
    assert guard.judge(65, 2.19, 1.0) is None
    assert guard.judge(66, 2.21, 1.0) is not None
    # Nothing at all to compare with: a loss that has always been 0.
    guard = SpikeGuard(FACTOR)
    assert fed(guard, [(0.0, 0.0)] * WINDOW + [(1.0, 1.0)]) == []


def test_off() -> None:
    guard = SpikeGuard(0.0, "skip")
    assert fed(guard, [*steps(100), (1e9, 1e9)]) == []
    assert not guard.refuses(1e9)


def test_skip_refuses_a_gradient_before_it_moves_anything() -> None:
    guard = SpikeGuard(FACTOR, "skip")
    fed(guard, steps(300))
    assert not guard.refuses(1.5)
    assert guard.refuses(50.0)
    row = guard.judge(301, 2.0, 50.0)
    assert row is not None
    assert (row["of"], row["grad_norm"]) == ("grad_norm", 50.0)
    assert row["action"].endswith("deviations above); update skipped")
    warns = SpikeGuard(FACTOR, "warn")
    fed(warns, steps(300))
    assert not warns.refuses(50.0)
    assert warns.judge(301, 2.0, 50.0) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_judged(value: float) -> None:
    guard = SpikeGuard(FACTOR, "skip")
    fed(guard, steps(WINDOW // 2))
    before = guard.loss.value, guard.norm.value
    assert not guard.refuses(value)
    assert guard.judge(101, value, value) is None
    assert (guard.loss.value, guard.norm.value) == before


@pytest.mark.parametrize("resumed", [1, FEWEST, WINDOW, 150, 201])
def test_a_resumed_run_judges_alike(resumed: int) -> None:
    """From what metrics.jsonl has of the steps before, spikes and numbers that are not finite among them."""
    numbers = steps(300)
    numbers[100] = (9.0, 40.0)
    numbers[199] = (math.nan, math.nan)
    numbers[201] = (9.0, 40.0)
    numbers[202] = (2.0, 40.0)
    whole = SpikeGuard(FACTOR, "skip")
    fed(whole, numbers[:resumed])
    rows = [
        {"loss": loss if math.isfinite(loss) else None, "grad_norm": norm if math.isfinite(norm) else None}
        for loss, norm in numbers[:resumed]
    ]
    rows = [json.loads(json.dumps(row)) for row in rows]
    again = SpikeGuard.from_rows(rows, FACTOR, "skip")
    rest = numbers[resumed:]
    recent = SpikeGuard.from_rows(rows[-WINDOW:], FACTOR, "skip")
    assert fed(recent, rest, resumed + 1) == fed(
        SpikeGuard.from_rows(rows, FACTOR, "skip"), rest, resumed + 1
    )
    assert fed(again, rest, resumed + 1) == fed(whole, rest, resumed + 1) != []
