"""Deadlines and budgets: how they are read, when they are kept, and what they are enough for."""

from __future__ import annotations

import pytest
from tests.plan.planning import asked

from shoal.facts.problem import Problem
from shoal.plan.amounts import DAY, read_budget, read_deadline, short
from shoal.plan.deadline import Verdict
from shoal.plan.report import plan_report


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("30d", 30),
        ("36h", 1.5),
        ("6w", 42),
        ("90 days", 90),
        ("1.5 weeks", 10.5),
        ("2 Hours", 1 / 12),
        ("12 months", 365.25),
        ("30 minutes", 1 / 48),
    ],
)
def test_lengths_of_time(text: str, days: float) -> None:
    problems: list[Problem] = []
    assert read_deadline(text, problems) == pytest.approx(days * DAY) and problems == []


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-3d", "3 fortnights", "1e9d", "999999y", "3dd", "3ds", "5m"]
)
def test_what_is_no_length_of_time(text: str) -> None:
    problems: list[Problem] = []
    assert read_deadline(text, problems) is None and "--deadline 30d" in problems[0].fix


@pytest.mark.parametrize(
    ("text", "money"), [("2M", 2e6), ("$500k", 5e5), ("1,500,000", 1.5e6), ("2.5M", 2.5e6), ("1_000", 1e3)]
)
def test_amounts_of_money(text: str, money: float) -> None:
    problems: list[Problem] = []
    assert read_budget(text, problems) == money and problems == []


@pytest.mark.parametrize("text", ["", "lots", "-2M", "0", "M"])
def test_what_is_no_amount(text: str) -> None:
    problems: list[Problem] = []
    assert read_budget(text, problems) is None and problems


@pytest.mark.parametrize(
    ("takes", "said"), [(89, "kept"), (95, "uncertain"), (105, "uncertain"), (112, "missed")]
)
def test_a_verdict_knows_its_error_bar(takes: float, said: str) -> None:
    assert Verdict("deadline", 100.0, takes, 0.1).verdict == said


def test_both_limits_are_judged() -> None:
    request = asked("llama3.2-1b", "8xH100", tokens="100B", price=2.0, deadline="30d", budget="10")
    found = plan_report(request)
    days, money = found.verdicts
    assert (days.what, days.verdict, money.what, money.verdict) == ("deadline", "kept", "budget", "missed")
    document = found.as_json()
    assert document["deadline"]["verdict"] == "kept" and document["budget"]["verdict"] == "missed"


def test_without_a_length_they_say_what_they_are_enough_for() -> None:
    found = plan_report(asked("llama3.2-1b", "8xH100", deadline="1d", price=2.0, budget="96"))
    plan, enough = found.choice, found.affordable
    assert plan is not None and enough is not None
    assert enough.seconds == pytest.approx(6 * 3600)  # 48 GPU-hours of 8 GPUs are less than a day
    assert enough.tokens == pytest.approx(plan.tokens_per_s * 6 * 3600, rel=0.01)
    document = found.as_json()["affordable"]
    best = document["compute_optimal"]
    assert 6 * best["parameters"] * best["tokens"] == pytest.approx(document["flops"])
    assert "tokens ±" in enough.text and found.verdicts == []


def test_counts_are_short() -> None:
    assert [short(count) for count in (7e10, 1.3e12, 999, 1.24e8)] == ["70B", "1.3T", "999", "124M"]
