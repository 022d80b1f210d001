"""A profiled step whose kernels are slower than when the device was calibrated."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.predict.calibrated import stored

from shoal.facts import calibration
from shoal.facts.cluster.notation import find
from shoal.facts.config.file import load
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.plan.resolve import resolve
from shoal.predict.time.cost_model import cost_model
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.measured_layer import by_kind
from shoal.predict.workload import Workload
from shoal.prove.profile_drift import of_run
from shoal.train.metrics.compare import Comparison

RECIPE = Recipe(seq=4096, batch=4, precision="bf16")
WORKLOAD = Workload(PRESETS["llama3.2-1b"], find("1xH200"), RECIPE, Layout.parse("micro=2"))


def test_slower_kernels_are_named_with_what_to_do() -> None:
    calibration.install("H200", stored().calibration(Path("a file")))
    kernels = cost_model(WORKLOAD).kernels
    assert isinstance(kernels, MeasuredKernels)
    kinds = by_kind(WORKLOAD, kernels)
    assert of_run(WORKLOAD, kinds, 1.0) == []
    assert of_run(WORKLOAD, {**kinds, "matrix products": 1.12 * kinds["matrix products"]}, 1.0) == [
        "matrix products 12% slower than when calibrated on 2026-11-15: run shoal profile --calibrate again, "
        "or check whether the device is throttled or shared"
    ]


def test_without_a_calibration_nothing_drifts() -> None:
    assert of_run(WORKLOAD, {"matrix products": 1e3, "attention": 1e3}, 1.0) == []


@pytest.mark.parametrize(
    ("seconds", "layout", "told"), [(2.3, "dp=1", True), (2.1, "dp=1", False), (2.3, "dp=2", False)]
)
def test_a_run_that_is_slower_than_its_calibration_says_so(seconds: float, layout: str, told: bool) -> None:
    job = resolve(load(None, ["cluster.on=2xcpu", "recipe.steps=9"], layout).config)
    plan = {"step": {"seconds": 2.0}, "rates": "measured", "calibrated": "2026-11-15T12:00:00Z"}
    comparison = Comparison(job, plan, on_gpu=False)
    rows = [{"step": number, "step_s": seconds, "memory_peak": 1} for number in range(1, 7)]
    found = [comparison.add(row) for row in rows][-1]
    assert found is not None
    assert (
        found.get("drift", "").startswith("steps take 15% longer than the calibration of 2026-11-15") == told
    )
