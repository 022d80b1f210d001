"""How many devices: the smallest that fits, that is in time, and the fastest that is within a budget."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.plan.planning import asked

from shoal.facts.problem import BadInput
from shoal.plan.how_many import how_many, sizes, with_count
from shoal.plan.report import plan, plan_report
from shoal.plan.request import plan_request
from shoal.plan.scale import best, cost
from shoal.plan.unspecified import pretraining_batch


def test_clusters_come_in_whole_nodes() -> None:
    found = sizes(plan_request("llama3-8b", "H100", seq=4096, batch=64))
    assert found[:8] == [1, 2, 4, 8, 16, 24, 32, 40] and 2048 in found and 2560 in found
    assert all(count % 8 == 0 for count in found if count > 4)
    steps = [larger / smaller for smaller, larger in itertools.pairwise(found[6:])]
    assert max(steps) <= 1.34


def test_a_deadline_is_answered_with_the_smallest_that_is_in_time() -> None:
    request = plan_request("llama3.2-1b", "H100", seq=4096, batch=512, tokens="300B", deadline="10d")
    found = how_many(request)
    assert found is not None and found.needed is not None and found.between is not None
    mine = best(found.asked, runnable=True)
    assert mine is not None and mine.world == found.devices
    assert cost(mine, 300 * 10**9).days <= 10
    counts = sizes(request)
    below = with_count(request, counts[counts.index(found.devices) - 1])
    assert below is not None
    slower = best(below, runnable=True)
    assert slower is None or cost(slower, 300 * 10**9).days > 10
    low, high = found.between
    assert low < found.needed < high and high - low >= 2 * 0.05 * found.needed
    assert f"{low:,} to {high:,} with the error bar" in found.text


def test_without_a_limit_it_is_the_smallest_that_needs_no_offload() -> None:
    found = how_many(plan_request("llama2-13b", "A100-80GB", seq=2048, batch=64))
    assert found is not None and found.devices == 4
    smaller = with_count(plan_request("llama2-13b", "A100-80GB", seq=2048, batch=64), 2)
    assert smaller is not None
    plan_on_two = best(smaller, runnable=True)
    assert plan_on_two is None or plan_on_two.layout.offload


def test_a_budget_takes_the_fastest_that_is_within_it() -> None:
    given: dict[str, Any] = {"seq": 4096, "batch": 256, "tokens": "100B", "price": 2.0}
    found = how_many(plan_request("llama3.2-1b", "H100", budget="5k", **given))
    assert found is not None and "fastest of those tried within the budget" in found.why
    mine = best(found.asked, runnable=True)
    assert mine is not None and (cost(mine, 10**11, 2.0).cost or 0) <= 5000
    much = how_many(plan_request("llama3.2-1b", "H100", budget="1M", **given))
    assert much is not None and "would do less than 75% of what it can" in much.why
    assert found.devices <= much.devices <= 512 < 2 * max(much.tried)  # there are 256 sequences to share
    never = how_many(plan_request("llama3.2-1b", "H100", budget="10", **given))
    assert never is not None and "over the budget" in never.why


def test_a_report_is_of_the_number_that_was_found() -> None:
    report = plan("llama3.2-1b", "H100", tokens="300B", deadline="10d")
    assert report.number is not None and report.asked.cluster.devices == report.number.devices
    document = report.as_json()
    assert document["how_many"]["low"] <= document["how_many"]["needed"] <= document["how_many"]["high"]
    assert document["cluster"]["devices"] == document["how_many"]["devices"]
    assert document["deadline"]["verdict"] in ("kept", "uncertain")


def test_a_missed_deadline_says_how_many_would_keep_it() -> None:
    report = plan("llama3.2-1b", "1xH100", seq=4096, batch=64, tokens="300B", deadline="10d")
    (late,) = report.verdicts
    assert late.verdict == "missed" and report.number is not None
    assert report.asked.cluster.devices == 1 < report.number.devices


def test_a_batch_of_its_own_is_shared_out() -> None:
    """DeepSeek LLM 67B on 2T tokens: 4608 sequences of 4096."""
    model = asked("llama3-70b", "8xH100").model
    assert pretraining_batch(model, 4096, 2 * 10**12, 2048) == 4096
    for devices in (1, 8, 24, 40, 56, 3072):
        batch = pretraining_batch(model, 8192, 15 * 10**12, devices)
        odd = devices & -devices
        assert batch % (devices // odd) == 0 and 2000 < batch < 9500


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "--batch is missing"),
        ({"batch": 8, "layout": "dp=8"}, "--layout needs the number"),
        ({"batch": 8, "deadline": "3d"}, "--on without a number needs the length"),
        ({"batch": 8, "budget": "2M", "tokens": "1B"}, "--budget needs a price"),
        ({"batch": 8, "deadline": "soon"}, "--deadline soon"),
        ({"batch": 8, "budget": "much", "price": 1.0}, "--budget much"),
        ({"batch": 8, "deadline": "0d"}, "--deadline 0d"),
    ],
)
def test_what_is_missing_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        plan_request("llama3.2-1b", "H100", seq=1024, **given)


def test_processes_on_a_cpu_are_no_cluster_to_be_sized() -> None:
    late = plan("tiny", "2xcpu", seq=128, batch=16, tokens="1T", deadline="1h", precision="fp32")
    (verdict,) = late.verdicts
    assert verdict.verdict == "missed" and late.number is None


def test_a_giant_is_not_trained_from_disks_to_be_in_time() -> None:
    found = how_many(plan_request("llama2-13b", "A100-80GB", seq=2048, batch=64, tokens="1M", deadline="30d"))
    assert found is not None and found.devices >= 2


def test_a_number_that_is_nowhere_is_refused() -> None:
    with pytest.raises(BadInput, match="no number of them does"):
        plan_report(plan_request("gpt2", "H100", seq=1024, batch=1, tokens="100T", deadline="1 minute"))
