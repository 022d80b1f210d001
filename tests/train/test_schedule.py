"""The learning rate: each shape at its ends, and everywhere between zero and the peak."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.recipe import Recipe
from shoal.train.optimizer import learning_rate

SHAPES = ("constant", "linear", "cosine", "wsd")


def rates(**recipe: Any) -> list[float]:
    made = Recipe(**{"steps": 100, "lr": 0.1, "warmup": 10, **recipe})
    return [learning_rate(made, step) for step in range(1, made.steps + 1)]


@pytest.mark.parametrize("schedule", SHAPES)
def test_warmup_rises_by_equal_steps_to_the_peak(schedule: str) -> None:
    for steps in (1, 3, 7, 10):  # 0.1 · 3 / 3 is not 0.1 in floating point
        rising = rates(schedule=schedule, warmup=steps)[:steps]
        assert rising[-1] == 0.1
        assert rising == pytest.approx([0.1 * (step + 1) / steps for step in range(steps)])


def test_constant_stays() -> None:
    assert set(rates(schedule="constant", lr_min=0.5)[9:]) == {0.1}


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_the_last_step_is_at_the_floor(schedule: str, floor: float) -> None:
    assert rates(schedule=schedule, lr_min=floor)[-1] == pytest.approx(0.1 * floor, abs=1e-12)


def test_halfway() -> None:
    assert rates(schedule="linear")[54] == pytest.approx(0.05)
    assert rates(schedule="cosine")[54] == pytest.approx(0.05)
    assert rates(schedule="linear", lr_min=0.5)[54] == pytest.approx(0.075)
    # A cosine begins and ends gently.
    assert rates(schedule="cosine")[20] > rates(schedule="linear")[20]
    assert rates(schedule="cosine")[90] < rates(schedule="linear")[90]


def test_wsd_is_stable_and_then_decays() -> None:
    wsd = rates(schedule="wsd", decay=20)
    assert set(wsd[9:80]) == {0.1}
    assert wsd[80:] == pytest.approx([0.1 * left / 20 for left in range(19, -1, -1)])
    assert set(rates(schedule="wsd", decay=0)[9:]) == {0.1}
    # A decay longer than what the warm-up leaves takes all of it.
    assert rates(schedule="wsd", decay="100%")[9:] == pytest.approx(rates(schedule="linear")[9:])


@pytest.mark.parametrize("schedule", SHAPES)
def test_without_warmup_and_with_nothing_else(schedule: str) -> None:
    assert rates(schedule=schedule, warmup="100%")[-1] == 0.1
    first = rates(schedule=schedule, warmup=0)[0]
    assert 0.09 < first <= 0.1
    assert len(rates(schedule=schedule, warmup=0, steps=1)) == 1


def test_the_peak_follows_the_linear_scaling_rule() -> None:
    assert rates(batch=32, lr_reference_batch=16)[9] == 0.2


@given(
    st.sampled_from(SHAPES),
    st.integers(1, 60),
    st.integers(0, 70) | st.floats(0, 1),
    st.integers(0, 70) | st.floats(0, 1),
    st.floats(0, 1),
)
def test_never_below_the_floor_nor_above_the_peak(
    schedule: str, steps: int, warmup: int | float, decay: int | float, floor: float
) -> None:
    recipe = Recipe.model_validate(
        {"schedule": schedule, "steps": steps, "warmup": warmup, "decay": decay, "lr_min": floor, "lr": 0.1}
    )
    curve = [learning_rate(recipe, step) for step in range(1, steps + 1)]
    assert all(0 <= rate <= 0.1 for rate in curve)
    after = curve[recipe.warmup_steps :]
    assert all(rate >= 0.1 * floor * (1 - 1e-12) for rate in after)
    assert after == sorted(after, reverse=True)
