"""Latency and bandwidth come back out of times that were made from them."""

from __future__ import annotations

import pytest

from shoal.comm.operations import TimedCollective, bus_share
from shoal.comm.picture import svg
from shoal.facts import calibration
from shoal.facts.cluster.notation import find
from shoal.predict.time.link_fit import PRICED, fit_operation, link_rates
from shoal.predict.time.links import ROUNDS, Links

RANKS, START, HOP, RATE = 4, 30e-6, 5e-6, 2e9
SIZES = (2**12, 2**16, 2**20, 2**24)


def made(op: str, rate: float = RATE) -> list[TimedCollective]:
    hops = ROUNDS[op] * (RANKS - 1) if op in ROUNDS else 1
    return [
        TimedCollective(op, RANKS, size, START + hops * HOP + size * bus_share(op, RANKS) / rate)
        for size in SIZES
    ]


def test_a_line_is_found_again() -> None:
    fit = fit_operation(made("all_reduce"))
    assert fit.latency == pytest.approx(START + 6 * HOP) and fit.bandwidth == pytest.approx(RATE)
    assert fit.worst < 1e-9


def test_noise_makes_neither_of_them_negative() -> None:
    falling = [TimedCollective("send", 2, size, 1e-3 / number) for number, size in enumerate(SIZES, start=1)]
    fit = fit_operation(falling)
    assert fit.latency == 0 and fit.bandwidth > 0 and fit.worst > 0.1
    assert fit_operation(falling[:1]).bandwidth == pytest.approx(falling[0].bus_bandwidth)


def test_the_planner_prices_a_call_as_it_was_measured() -> None:
    """Each at its own bandwidth: gloo's reduce-scatter sends twice what a ring would. On a node, and between nodes."""
    slower = {"reduce_scatter": RATE / 2, "all_gather": 0.8 * RATE, "all_to_all": RATE / 3}
    calls = [call for op in (*PRICED, "all_to_all") for call in made(op, slower.get(op, RATE))]
    rates = link_rates(calls, "made up")
    assert rates is not None and rates.bandwidth == pytest.approx(0.9 * RATE)
    for kind, name in (("fast", f"{RANKS}xcpu"), ("network", f"{RANKS}x1xcpu")):
        cluster = find(name)
        known = calibration.find(cluster)
        nothing = calibration.FAST.model_copy(update={"start": 0.0, "hop": 0.0})
        links = Links(cluster, known.model_copy(update={"fast": nothing, kind: rates}))
        for call in calls:
            assert links.seconds(call.op, call.bytes, RANKS, 1) == pytest.approx(call.seconds, rel=0.05), call
        # Of large messages the latency is too little to see.
        large = [call for call in calls if call.bytes == SIZES[-1]]
        for call in large:
            assert links.seconds(call.op, call.bytes, RANKS, 1) == pytest.approx(call.seconds, rel=1e-2), call


def test_too_few_calls_are_no_link() -> None:
    assert link_rates(made("all_reduce"), "alone") is None
    assert link_rates([call for op in PRICED for call in made(op)[:1]], "one size") is None


def test_bandwidths_are_those_of_nccl_tests() -> None:
    call = TimedCollective("all_reduce", 8, 8_000, 1e-3)
    assert call.algorithm_bandwidth == pytest.approx(8e6) and call.bus_bandwidth == pytest.approx(14e6)
    others = {"all_gather": 7 / 8, "reduce_scatter": 7 / 8, "all_to_all": 7 / 8}
    assert {op: bus_share(op, 8) for op in others} == others
    assert {bus_share(op, 8) for op in ("send", "broadcast", "reduce")} == {1.0}


def test_the_picture_has_every_point_and_line() -> None:
    calls = [call for op in PRICED for call in made(op)]
    drawn = svg(calls, {op: fit_operation(made(op)) for op in PRICED}, "a <title>", 2e9, "loopback")
    assert drawn.count("<circle") == len(calls) and drawn.count("<polyline") == len(PRICED)
    assert "a &lt;title&gt;" in drawn and "loopback: 2 GB/s" in drawn
