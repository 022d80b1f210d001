"""Headroom: how it is written, what keeps it, and the probability of running out, counted again."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path

import pytest
from tests.plan.planning import answered, asked, judged

from shoal.facts.problem import BadInput
from shoal.plan.headroom import (
    BEYOND,
    GIB,
    LEAST,
    MORE_THAN,
    RANKS,
    USUAL,
    Headroom,
    chance,
    more_than,
    out_of_memory,
    read_headroom,
)


def test_the_distribution_is_that_of_the_ranks_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # Benchmarks are scripts: they import each other from where they lie.
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    tables = importlib.import_module("predicted_tables")
    found = []
    for one in tables.measured():
        for rank, peak in zip(one["ranks"], tables.row_of(one).peaks, strict=True):
            if peak.predicted >= LEAST:
                found.append(rank["reserved"] / peak.predicted)
    assert len(found) == RANKS
    twentieths = statistics.quantiles(found, n=20)
    expected = [twentieths[round(20 * (1 - share)) - 1] for _, share in MORE_THAN[1:]]
    assert [times for times, _ in MORE_THAN[1:]] == pytest.approx(expected, abs=5e-4)
    beyond = [one - expected[-1] for one in found if one > expected[-1]]
    assert pytest.approx(statistics.mean(beyond), abs=5e-4) == BEYOND
    # As often as it is said to happen, it has.
    for times in (1.01, 1.025, 1.05, 1.06, 1.075, 1.09):
        share = sum(one > times for one in found) / RANKS
        assert more_than(times) == pytest.approx(share, abs=0.06)


def test_the_fuller_the_likelier() -> None:
    times = [0.9 + 0.005 * number for number in range(80)]
    found = [more_than(one) for one in times]
    assert found == sorted(found, reverse=True) and found[0] == 1.0 and found[-1] < 1e-6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.1", Headroom(share=0.1)),
        ("10%", Headroom(share=0.1)),
        ("0", Headroom()),
        ("8GiB", Headroom(size=8 * GIB)),
        ("4.5 gb", Headroom(size=4_500_000_000)),
    ],
)
def test_it_is_a_share_or_a_size(text: str, expected: Headroom) -> None:
    assert read_headroom(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "1", "100%", "8", "much", "8TiB", "nan"])
def test_anything_else_is_refused_with_the_fix(text: str) -> None:
    with pytest.raises(BadInput, match="headroom"):
        asked("gpt2", "8xH100", 1024, 8, headroom=text)


def test_every_plan_leaves_what_was_asked_for_and_what_is_chosen_the_usual() -> None:
    found = answered("llama3-8b", "8xH100", headroom="30GiB")
    assert found.chosen is not None and len(found.plans) > 5
    for plan in (*found.plans, *found.chosen.answers.values()):
        assert plan.memory.capacity - plan.memory.device_total >= 30 * GIB
        assert plan.out_of_memory == out_of_memory(plan.memory) < 0.001
    usual = answered("llama3-8b", "8xH100")
    assert usual.chosen is not None and usual.chosen.headroom == USUAL
    assert USUAL.left_by(usual.chosen.plan.memory) and USUAL.left_by(usual.chosen.safest.memory)
    assert any(not USUAL.left_by(plan.memory) for plan in usual.plans)


def test_json_has_the_three_answers() -> None:
    found = answered("llama3-8b", "8xH100")
    document = found.as_json()
    chosen = document["chosen"]
    assert chosen["layout"] == chosen["simplest"] and chosen["headroom"] == USUAL.bytes(
        document["cluster"]["capacity"]
    )
    for name in ("simplest", "fastest", "safest"):
        answer = chosen["answers"][name]
        assert answer["layout"] == chosen[name]
        assert answer["headroom"] == answer["memory"]["capacity"] - answer["memory"]["device_p90"]
        assert 0 <= answer["out_of_memory"] <= 1
    seconds = {name: answer["step"]["seconds"] for name, answer in chosen["answers"].items()}
    assert seconds["fastest"] == min(seconds.values())


def test_a_plan_that_barely_fits_says_how_likely_it_does_not() -> None:
    tight, roomy = judged("fsdp=8,micro=4"), judged("fsdp=8,micro=1")
    assert tight.memory.device_total > roomy.memory.device_total
    assert tight.out_of_memory > roomy.out_of_memory
    assert chance(0.0004) == "<0.1%" and chance(0.053) == "5.3%" and chance(0.25) == "25%"
