"""A model by its size: near it, and of a shape that ranks can share."""

from __future__ import annotations

from math import prod

import pytest

from shoal.facts.model.by_size import of_size, read_size
from shoal.facts.model.checkpoint_views import canonical_parameters
from shoal.facts.model.presets import PRESETS, find


@pytest.mark.parametrize(
    "text",
    ["10M", "124M", "350M", "1B", "1.5b", "3B", "7B", "10B", "13B", "30B", "70B", "175B", "405B", "1T"],
)
def test_as_many_parameters_as_asked(text: str) -> None:
    model, size = of_size(text), read_size(text)
    assert model is not None and size is not None
    counted = sum(prod(shape) for _, shape, _ in canonical_parameters(model))
    assert counted == pytest.approx(size, rel=0.07)
    assert (
        (model.layers % 2 == 0 or size < 10**8) and model.heads % 4 == 0 and model.heads % model.kv_heads == 0
    )
    assert 0.4 <= model.hidden / model.layers / 128 <= 2.5


def test_a_size_that_a_model_was_published_with_has_its_shape() -> None:
    eight, llama = find("8B"), PRESETS["llama3-8b"]
    assert (eight.layers, eight.hidden, eight.ffn, eight.kv_heads) == (
        llama.layers,
        llama.hidden,
        llama.ffn,
        llama.kv_heads,
    )


@pytest.mark.parametrize("text", ["10", "B", "10G", "0B", "100T", "llama3-8b", "1e9", "-1B"])
def test_what_is_no_size(text: str) -> None:
    assert read_size(text) is None and of_size(text) is None
