"""Compute-optimal tokens and sizes: each the inverse of the other, at the minimum of the loss, as Chinchilla was."""

from __future__ import annotations

import pytest

from shoal.plan.compute_optimal import (
    ALPHA,
    BETA,
    FIT,
    A,
    B,
    ComputeOptimal,
    parameters_for,
    split,
    tokens_for,
)


def loss(parameters: float, tokens: float) -> float:
    return float(A / parameters**ALPHA + B / tokens**BETA)


@pytest.mark.parametrize("size", [1.2e8, 8e9, 7e10, 4e11])
def test_no_other_split_of_the_same_compute_is_better(size: float) -> None:
    tokens = tokens_for(size)
    assert parameters_for(tokens) == pytest.approx(size)
    assert split(6 * size * tokens) == pytest.approx((size, tokens))
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert loss(size * factor, tokens / factor) > loss(size, tokens)


def test_chinchilla_itself() -> None:
    """70B parameters on 1.4T tokens, about 20 each; Gopher's compute went into 280B and 300B tokens."""
    assert tokens_for(70e9) == pytest.approx(1.4e12, rel=0.15)
    assert split(5.76e23)[0] == pytest.approx(70e9, rel=0.15)


def test_it_says_which_fit_and_how_far_off_a_run_is() -> None:
    found = ComputeOptimal(70_000_000_000, tokens_for(70e9), 15 * 10**12)
    document = found.as_json()
    assert FIT in found.text and document["fit"] == FIT and "2022" in FIT and "2024" in FIT
    assert document["asked_over_optimal"] == pytest.approx(15e12 / tokens_for(70e9))
    same = document["same_compute"]
    assert same["parameters"] * same["tokens"] == pytest.approx(70e9 * 15e12)
    assert "times that" in found.text
    assert "times that" not in ComputeOptimal(70_000_000_000, tokens_for(70e9), None).text
