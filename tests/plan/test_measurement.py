"""The measurement that would change a decision: with what is said to be the limit crossed, the planner decides so."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from tests.plan.planning import answered, asked

from shoal.facts.cluster import Cluster
from shoal.plan.judge import Plan, judge
from shoal.plan.measurement import FULLEST, decisive


def over(plan: Plan, cluster: Cluster, factor: float) -> float:
    """Seconds of a step with other links within nodes."""
    assert cluster.fast is not None
    fast = cluster.fast.model_copy(update={"bandwidth": cluster.fast.bandwidth * factor})
    request = asked("llama3-8b", "8xH100", 8192, 64)
    workload = request.workload(plan.layout)
    return judge(replace(workload, cluster=cluster.model_copy(update={"fast": fast}))).step.seconds


def test_beyond_the_limit_the_other_layout_wins() -> None:
    found = answered("llama3-8b", "8xH100", 8192, 64)
    measurement = found.measurement
    assert measurement is not None and measurement.factor is not None and "NVLink" in measurement.what
    assert found.choice is not None
    (rival,) = [plan for plan in found.plans if str(plan.layout) == measurement.instead]
    cluster = found.asked.cluster
    away = 1.05 if measurement.factor > 1 else 0.95
    for factor, wins in ((measurement.factor * away, True), (measurement.factor**0.5, False)):
        theirs, ours = over(rival, cluster, factor), over(found.choice, cluster, factor)
        assert (theirs * (1 + rival.error_bar) < ours) is wins
    assert "bench comm" in measurement.command and measurement.instead in measurement.text


def test_a_layout_that_nearly_fills_the_device_is_measured_for_memory() -> None:
    found = answered("llama3-8b", "16xH100", 8192, 128)
    measurement, plan = found.measurement, found.choice
    assert measurement is not None and plan is not None and measurement.what == "memory"
    assert (
        measurement.factor == pytest.approx(plan.memory.capacity / plan.memory.device_p90)
        and measurement.factor < FULLEST
    )
    save, dry = measurement.command.split(" && ")
    assert shlex.split(save)[:3] == ["shoal", "plan", "llama3-8b"] and dry == "shoal dryrun plan.toml"
    assert found.as_json()["measurement"]["command"] == measurement.command


def test_a_decision_that_nothing_changes_says_so() -> None:
    measurement = answered("gpt2", "8xH100", 1024, 512).measurement
    assert measurement is not None and measurement.factor is None and "No rate" in measurement.text


def test_replicas_on_a_cpu_have_nothing_to_measure() -> None:
    found = answered("tiny", "2xcpu", 128, 16, precision="fp32")
    assert found.chosen is not None and decisive(found.chosen, found.plans) is None
    assert found.as_json()["measurement"] is None
