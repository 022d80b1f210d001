"""Recipes: lengths in steps or tokens, spans, the linear scaling rule, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.facts.recipe import Recipe, read_count, read_span, write_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("15T", 15 * 10**12),
        ("1.5b", 1_500_000_000),
        (" 300 M ", 300_000_000),
        ("2g", 2 * 10**9),
        ("0.5k", 500),
        ("10_000", 10_000),
        ("7", 7),
        ("0", 0),
        ("9007199254740993", 2**53 + 1),  # a float would lose the last digit
    ],
)
def test_counts_as_people_write_them(text: str, count: int) -> None:
    assert read_count(text) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (15 * 10**12, "15T"),
        (1_500_000_000, "1.5B"),
        (12_340_000, "12.34M"),
        (12_345_000, "12345000"),
        (999_990_000_000_000, "999.99T"),
        (2_000_000_000_000_000, "2000T"),
        (524_288, "524288"),
        (2**53 + 1, "9007199254740993"),
    ],
)
def test_a_count_is_written_as_briefly_as_it_reads_back(count: int, text: str) -> None:
    assert write_count(count) == text and read_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "T", "-3", "1.5", "0.0001k", "1e9", "15 TB", "1,000", "٣", "_1", "9" * 400]
)
def test_what_is_not_a_whole_count(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole count such as 15T, 300M or 10000"):
        read_count(text)


@pytest.mark.parametrize(
    ("value", "steps", "span"),
    [
        (100, 400, 100),
        (0, 400, 0),
        (1, 400, 1),  # one step, where 1.0 is the whole run
        (1.0, 400, 400),
        (0.05, 400, 20),
        (0.0, 400, 0),
        ("5%", 400, 20),
        ("100%", 400, 400),
        ("0%", 400, 0),
        (" 2.5 % ", 400, 10),
        ("1%", 10, 0),
    ],
)
def test_spans(value: int | float | str, steps: int, span: int) -> None:
    assert read_span(value, steps) == span


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [(4096, 1), (1, 1), (4097, 2), ("15T", 3_662_109_375), ("1M", 245), (1e6, 245), (2**40, 2**28)],
)
def test_tokens_are_rounded_up_to_steps(tokens: Any, steps: int) -> None:
    recipe = Recipe(seq=256, batch=16, tokens=tokens)
    assert recipe.steps == steps
    assert (recipe.steps - 1) * recipe.tokens_per_step < (recipe.tokens or 0)


@given(st.integers(1, 10**15), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_recipe_reads_back_equal(tokens: int, seq: int, batch: int) -> None:
    recipe = Recipe(seq=seq, batch=batch, tokens=tokens)
    assert Recipe(**recipe.model_dump()) == recipe
    assert recipe.steps * seq * batch >= tokens


def test_steps_and_tokens_must_agree() -> None:
    assert Recipe(steps=2, tokens=4096).steps == 2
    with pytest.raises(
        ValidationError, match=r"steps = 3 and tokens = 4k disagree: so many tokens are 2 steps of 128·16"
    ):
        Recipe(steps=3, tokens="4k")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("warmup", "expected"), [("100%", 400), ("0%", 0), (0, 0), (1000, 400), (0.5, 200), ("5%", 20)]
)
def test_warmup_stays_inside_the_run(warmup: int | float | str, expected: int) -> None:
    recipe = Recipe(steps=400, warmup=warmup, decay="100%")
    assert recipe.warmup_steps == expected
    assert recipe.decay_steps == 400 - expected


def test_linear_scaling_rule() -> None:
    assert Recipe(lr=0.1).peak_lr == 0.1
    assert Recipe(lr=0.1, batch=64, lr_reference_batch=16).peak_lr == pytest.approx(0.4)
    assert Recipe(lr=0.1, batch=8, lr_reference_batch=16).peak_lr == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("seq", 0, "greater than or equal to 1"),
        ("seq", 10**10, "less than or equal to"),
        ("seq", "256", "valid integer"),
        ("seq", 256.0, "valid integer"),
        ("seq", True, "valid integer"),
        ("batch", -1, "greater than or equal to 1"),
        ("steps", 0, "greater than or equal to 1"),
        ("tokens", 0, "greater than or equal to 1"),
        ("tokens", "many", "'many' is not a whole count"),
        ("tokens", 1.5, "valid integer"),
        ("tokens", "9e9", "is not a whole count"),
        ("tokens", "1" * 30 + "T", "less than or equal to"),
        ("tokens", float("inf"), "valid integer"),
        ("lr", 0.0, "greater than 0"),
        ("lr", float("nan"), "finite"),
        ("lr", float("inf"), "finite"),
        ("lr", "high", "valid number"),
        ("lr_min", 1.5, "less than or equal to 1"),
        ("beta2", 1.0, "less than 1"),
        ("clip", float("inf"), "finite"),
        ("seed", 2**63, "less than"),
        ("seed", -1, "greater than or equal to 0"),
        ("dropout", 1.0, "less than 1"),
        ("optimizer", "adam", "'adafactor' or 'muon'"),
        ("precision", "fp4", "'fp32'"),
        ("warmup", -1, "must not be negative"),
        ("warmup", -0.1, "between 0 and 1"),
        ("warmup", 1.5, "between 0 and 1"),
        ("warmup", "101%", "between 0 and 1"),
        ("warmup", "5", 'a percentage \\("5%"\\)'),
        ("warmup", "-5%", "a percentage"),
        ("warmup", "%", "a percentage"),
        ("warmup", float("nan"), "finite|between 0 and 1"),
        ("warmup", True, "valid"),
        ("decay", "soon", "a percentage"),
        ("nonsense", 1, "not permitted"),
    ],
)
def test_what_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        Recipe(**{field: value})
    assert caught.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize("other", [{"seq": {}}, {"seq": [1]}, {"batch": "x"}, {"batch": 0}, {"seq": None}])
def test_tokens_do_not_hide_what_is_wrong_with_the_rest(other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe(tokens="15T", **other)  # type: ignore[arg-type]
    assert caught.value.errors()[0]["loc"][0] in other
