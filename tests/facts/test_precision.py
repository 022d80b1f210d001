"""One table of precisions: memory, traffic and the engine count the same bytes."""

from __future__ import annotations

import pytest
import torch

from shoal.facts.bytes_per_parameter import bytes_per_parameter
from shoal.facts.cluster import notation
from shoal.facts.cluster.stack import SHOAL
from shoal.facts.layout import Layout
from shoal.facts.model import presets
from shoal.facts.precision import compute_width, gradient_width, reduce_width, state_width, weight_width
from shoal.facts.recipe import Recipe
from shoal.predict.traffic import calls
from shoal.predict.workload import Workload
from shoal.train.program import compute_dtype, parameter_dtype, reduce_dtype


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_memory_and_traffic_count_the_same_bytes(precision: str, states: str, reduce: str) -> None:
    recipe = Recipe.model_validate({"precision": precision, "states": states, "reduce": reduce})
    for sharded in (False, True):
        held = bytes_per_parameter(recipe.model_copy(update={"optimizer": "sgd"}), SHOAL, sharded)
        assert held.compute == compute_width(recipe)
        assert held.weight == (state_width(recipe) if sharded else weight_width(recipe))
        assert held.master == (0 if sharded or held.weight == state_width(recipe) else state_width(recipe))
        assert held.gradient == gradient_width(recipe)
        assert held.reduce == reduce_width(recipe)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_the_engine_uses_tensors_of_that_width(precision: str, states: str) -> None:
    recipe = Recipe.model_validate({"precision": precision, "states": states})
    assert compute_dtype(recipe).itemsize == compute_width(recipe)
    assert parameter_dtype(recipe).itemsize == state_width(recipe) == gradient_width(recipe)
    reduced: torch.dtype = reduce_dtype(recipe) or parameter_dtype(recipe)
    assert reduced.itemsize == reduce_width(recipe)


def test_weights_beside_int8_states_are_bf16() -> None:
    """In memory and on the way alike."""
    recipe = Recipe.model_validate({"precision": "bf16", "states": "int8", "seq": 512, "batch": 8})
    of = Workload(presets.find("tiny"), notation.find("8xH100"), recipe, Layout(fsdp=8, zero=1))
    sent = {call.phase: call.bytes * call.count for call in calls(of, 0) if call.group == "fsdp"}
    assert sent["update"] / sent["gradients"] == pytest.approx(2 / 4, rel=1e-4)
