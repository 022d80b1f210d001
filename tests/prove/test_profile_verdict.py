"""Verdicts in words: what stands out is named with a fix that fits the layout, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.facts.cluster import notation
from shoal.facts.layout import Layout
from shoal.facts.model import presets
from shoal.facts.recipe import Recipe
from shoal.predict.workload import Workload
from shoal.prove.measured_bubble import MeasuredPipeline
from shoal.prove.profile_verdict import Evidence, verdict


def workload(layout: str, on: str = "8xA100-80GB", batch: int = 32) -> Workload:
    recipe = Recipe(seq=1024, batch=batch, precision="bf16")
    return Workload(presets.find("tiny"), notation.find(on), recipe, Layout.parse(layout))


def evidence(layout: str = "dp=8,micro=2", **changes: object) -> Evidence:
    quiet = Evidence(
        workload(layout), seconds=1.0, predicted_seconds=1.02, peak=10**9, predicted_peak=10**9 + 10**6
    )
    return replace(quiet, **changes)  # type: ignore[arg-type]


def test_a_clean_bill() -> None:
    usual = evidence(input_wait=0.01, exposed_comm=0.05, optimizer=0.03, host_gaps=0.08, spread=0.05)
    assert verdict(usual) == ["nothing stands out"]


@pytest.mark.parametrize(
    ("given", "said", "fix"),
    [
        (evidence(input_wait=0.18), "input wait 18% of the step", "loader"),
        (
            evidence("tp=8", exposed_comm=0.22, links=("tp",)),
            "tensor-parallel collectives exposed for 22%",
            "smaller tp",
        ),
        (
            evidence(exposed_comm=0.22, links=("dp",)),
            "gradient all-reduce exposed for 22% of the step, over NVLink 3",
            "batch",
        ),
        (
            evidence("tp=2", workload=workload("tp=2", "2xA100-PCIe-80GB"), exposed_comm=0.22, links=("tp",)),
            "tensor-parallel collectives exposed for 22% of the step, over PCIe 4.0 x16",
            "smaller tp",
        ),
        (
            evidence(workload=workload("dp=16,micro=2", "16xA100-80GB"), exposed_comm=0.2, links=("dp",)),
            "over InfiniBand",
            "recipe.reduce=bf16",
        ),
        (evidence("fsdp=8", exposed_comm=0.3, links=("fsdp·cp",)), "weight all-gather", "zero=2"),
        (evidence("cp=8", exposed_comm=0.3, links=("cp",)), "context-parallel", "smaller cp"),
        (evidence("dp=8", exposed_comm=0.3, links=("dp/ep",)), "gradient all-reduce", "recipe.batch"),
        (evidence(host_gaps=0.25), "host gaps 25% of the step: the device waits", "micro=4"),
        (evidence(workload=workload("dp=2,micro=2", "2xcpu"), host_gaps=0.25), "Python overhead", "micro=4"),
        (evidence("dp=8,micro=4", host_gaps=0.25), "host gaps 25%", "larger recipe.batch"),
        (evidence("tp=8", host_gaps=0.25), "host gaps 25%", "smaller tp"),
        (evidence(optimizer=0.3), "optimizer 30%", "fsdp"),
        (evidence("dp=8,recompute=full", recompute=0.24), "recomputation 24%", "recompute=none"),
        (evidence(copies=0.2), "copies to and from the host 20%", "reads tensors back"),
        (evidence(spread=0.5), "timed steps differ by 50%", "idle"),
        (evidence(stages=({0: 1.0, 1: 1.5, 2: 1.0},)), "rank 1 computes 50% longer", "clock"),
        (evidence(seconds=1.5, rates="built in (assumed)"), "the step is 47% slower", "--calibrate"),
        (evidence(seconds=4.08), "takes 4.0 times as long as predicted", "--calibrate"),
        (
            evidence(seconds=1.5, rates="measured here", rates_measured=True),
            "rates: measured here; the machine has changed",
            "--calibrate",
        ),
        (
            evidence(seconds=40.0, shared=True, exposed_comm=0.8, host_gaps=0.3, links=("dp",)),
            "ranks share a device",
            "times are not",
        ),
        (evidence(predicted_peak=9 * 10**8), "peak memory is predicted 10.0% too low", "allow for that"),
    ],
)
def test_what_stands_out_comes_with_a_fix(given: Evidence, said: str, fix: str) -> None:
    (sentence,) = verdict(given)
    assert said in sentence
    assert fix in sentence


@pytest.mark.parametrize(
    ("layout", "pipeline", "said"),
    [
        ("pp=2,micro=4", MeasuredPipeline(0.31, 0.3, 0.3, [1, 1]), "micro=2) or schedule=zbv"),
        ("pp=2,micro=1", MeasuredPipeline(0.31, 0.3, 0.3, [1, 1]), "a larger recipe.batch"),
        ("pp=2,micro=1", MeasuredPipeline(0.4, 0.2, 0.2, [1, 1]), "messages arrive late"),
        ("pp=2,micro=1", MeasuredPipeline(0.4, 0.4, 0.2, [1, 3]), "pipeline rank 1 computes 1.5 times"),
    ],
)
def test_a_bubble_is_the_schedules_or_the_links_or_the_cuts(
    layout: str, pipeline: MeasuredPipeline, said: str
) -> None:
    (sentence,) = verdict(evidence(layout, pipeline=pipeline))
    assert sentence.startswith(f"bubble {pipeline.measured:.0%}")
    assert said in sentence


def test_recomputation_that_memory_needs_is_not_blamed() -> None:
    large = Workload(
        presets.find("llama3-8b"),
        notation.find("8xA100-40GB"),
        Recipe(seq=8192, batch=64, precision="bf16"),
        Layout.parse("fsdp=8,micro=8,recompute=full"),
    )
    assert verdict(evidence(workload=large, recompute=0.24)) == ["nothing stands out"]


def test_the_largest_share_comes_first() -> None:
    first, second, third = verdict(evidence(input_wait=0.2, host_gaps=0.3, optimizer=0.25))
    assert first.startswith("host gaps") and second.startswith("optimizer") and third.startswith("input wait")
