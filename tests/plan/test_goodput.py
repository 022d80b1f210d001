"""Goodput: the cheapest interval is the cheapest, the share of time is a played run's, failures are as published."""

from __future__ import annotations

import random

import pytest
from tests.plan.planning import judged

from shoal.plan import goodput as module
from shoal.plan.goodput import (
    GPU_HOURS_BETWEEN,
    RATES,
    cheapest_interval,
    goodput,
    in_words,
    state_bytes,
    useful,
)
from shoal.plan.scale import cost

HERD = "fsdp=128,tp=8,pp=16,schedule=interleaved,chunks=6,recompute=full"


@pytest.mark.parametrize(
    ("costs", "between"), [(0.2, 11_000.0), (10.0, 3600.0), (120.0, 7200.0), (600.0, 3600.0)]
)
def test_no_other_interval_is_cheaper(costs: float, between: float) -> None:
    best = cheapest_interval(costs, between)
    shares = [useful(best * factor, costs, 300.0, between) for factor in (0.5, 0.8, 1.0, 1.25, 2.0)]
    assert max(shares) <= shares[2] * 1.002
    assert shares[0] < shares[2] > shares[4]


def test_the_share_is_that_of_a_run_that_is_played() -> None:
    """Interruptions at random moments, also within checkpoints and restarts."""
    interval, costs, restart, between = 600.0, 30.0, 300.0, 5000.0
    draw = random.Random(1)
    clock, done, strikes = 0.0, 0.0, draw.expovariate(1 / between)
    for _ in range(40_000):
        while clock + interval + costs > strikes:
            clock = strikes
            strikes = clock + draw.expovariate(1 / between)
            while clock + restart > strikes:
                clock = strikes
                strikes = clock + draw.expovariate(1 / between)
            clock += restart
        clock += interval + costs
        done += interval
    assert done / clock == pytest.approx(useful(interval, costs, restart, between), rel=0.01)


def test_llama_3_kept_more_than_nine_tenths() -> None:
    """Its report: more than 90 % effective training time, an interruption in about three hours."""
    found = goodput(judged(HERD, "llama3-405b", "16384xH100", 8192, 2048))
    assert found is not None and found.hours_between == pytest.approx(54 * 24 / 419)
    assert 0.9 < found.least < found.share < found.most < 1
    assert found.least > 0.94 and found.most < 0.99
    assert f"checkpoint.every={found.checkpoint_every}" in in_words(found)


def test_other_published_rates_are_on_either_side() -> None:
    node_days = 1000 * 24 * 8 / GPU_HOURS_BETWEEN
    assert RATES[0] < 1 < RATES[1]
    assert [rate * node_days for rate in RATES] == pytest.approx([2.34, 6.50])


def test_the_interval_is_in_whole_steps_and_the_cheapest_of_them() -> None:
    plan = judged("fsdp=8,micro=1")
    found = goodput(plan)
    assert found is not None
    between = found.hours_between * 3600
    steps = [
        found.checkpoint_every - found.checkpoint_every // 4,
        found.checkpoint_every,
        2 * found.checkpoint_every,
    ]
    shares = [
        useful(every * plan.step.seconds, found.checkpoint_seconds, found.restart_seconds, between)
        for every in steps
    ]
    assert shares[1] == found.share == max(shares)


def test_a_checkpoint_holds_weights_and_both_moments() -> None:
    plan = judged("fsdp=8,micro=1")
    assert state_bytes(plan.workload) == 12 * 8_030_261_248


def test_days_and_dollars_have_it_in_them() -> None:
    plan = judged(HERD, "llama3-405b", "16384xH100", 8192, 2048)
    total = cost(plan, 15 * 10**12, price=2.0)
    assert total.goodput is not None
    assert total.seconds == pytest.approx(total.training_seconds / total.goodput.share)
    assert (
        total.cost == pytest.approx(2 * total.gpu_hours)
        and total.gpu_hours > 16384 * total.training_seconds / 3600
    )
    assert total.kwh == pytest.approx(0.7 * total.gpu_hours)


def test_processes_on_a_cpu_have_no_published_rate() -> None:
    plan = judged("dp=2", "tiny", "2xcpu", 128, 4)
    assert goodput(plan) is None
    assert cost(plan, 10**6).seconds == cost(plan, 10**6).training_seconds


def test_a_run_that_never_ends_has_none() -> None:
    assert useful(1e6, 10.0, 300.0, 60.0) == 0.0
    assert cheapest_interval(500.0, 100.0) == 100.0
    assert module.useful(10.0, 0.0, 0.0, 1e9) == pytest.approx(1.0)
