"""Products in fp8: faster than in bf16, by less than the device's rates say; attention and head are as they were."""

from __future__ import annotations

from typing import Literal

import pytest

from shoal.facts.cluster.notation import find
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Precision, Recipe
from shoal.predict.time.cost_model import cost_model
from shoal.predict.time.step import step
from shoal.predict.workload import Workload


def asked(
    precision: Precision,
    on: str = "1xH200",
    model: str = "llama3-8b",
    batch: int = 4,
    states: Literal["fp32", "bf16"] = "bf16",
) -> Workload:
    recipe = Recipe(seq=4096, batch=batch, steps=1, precision=precision, states=states)
    return Workload(PRESETS[model], find(on), recipe, Layout(micro=batch))


@pytest.mark.parametrize(
    ("model", "batch", "states", "measured"),
    [("llama3.2-1b", 8, "fp32", 0.408), ("llama3-8b", 4, "bf16", 0.913)],
)
def test_a_step_takes_what_was_measured(
    model: str, batch: int, states: Literal["fp32", "bf16"], measured: float
) -> None:
    """On an H200, blocks compiled (docs/fp8.md); no constant was fitted to it."""
    workload = asked("fp8", model=model, batch=batch, states=states)
    assert step(workload).seconds == pytest.approx(measured, rel=0.05)


def test_only_the_products_of_blocks_are_faster() -> None:
    plain, fp8 = cost_model(asked("bf16")), cost_model(asked("fp8"))
    assert 1.9 < fp8.faster < 2.1 and plain.faster == 1
    tokens, rows = 4 * 4096, 128_256
    assert fp8.head(tokens, rows, fp8.handling(False, 1), True) == plain.head(
        tokens, rows, plain.handling(False, 1), True
    )
    gain = step(asked("bf16")).seconds / step(asked("fp8")).seconds
    assert 1.3 < gain < 1.6


def test_a_device_without_fp8_takes_as_long_as_in_bf16() -> None:
    assert step(asked("fp8", "1xA100-80GB")).seconds == step(asked("bf16", "1xA100-80GB")).seconds
