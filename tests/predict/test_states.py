"""The states of a replica, against the tensors that training really keeps."""

from __future__ import annotations

import pytest
import torch

from shoal.facts.layout import Layout
from shoal.facts.layout.stages import cut
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.models.decoder import build
from shoal.models.initial import initialise
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import NoReducer, held_parameters
from shoal.parallel.stage_module import split_stages
from shoal.predict.memory.states import rank_states, replica_states
from shoal.train import optimizer as optimizers
from shoal.train.program import parameter_dtype


@pytest.mark.parametrize(
    "recipe",
    [Recipe(), Recipe(optimizer="sgd"), Recipe(precision="bf16", states="bf16"), Recipe(precision="fp64")],
    ids=["adamw", "sgd", "bf16", "fp64"],
)
def test_predicted_bytes_are_those_of_the_tensors(recipe: Recipe) -> None:
    model = PRESETS["tiny"]
    network = build(model, dtype=parameter_dtype(recipe)).to_empty(device="cpu")
    initialise(network, model, 0)
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    segments = split_stages(network, cut(model, 1), own_head=False)
    optimizer = optimizers.build(NoReducer(held_parameters(segments, model, mesh), mesh).pieces, recipe)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    def size(tensors: list[torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    parameters = list(network.parameters())
    kept = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert replica_states(model, recipe) == {
        "params": size(parameters),
        "grads": size([parameter.grad for parameter in parameters if parameter.grad is not None]),
        "optimizer": size(kept),
    }


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        ("dp=8", (1, 1, 1)),
        ("fsdp=4,zero=1", (1, 1, 4)),
        ("fsdp=4,zero=2", (1, 4, 4)),
        ("dp=2,fsdp=4", (4, 4, 4)),
        ("fsdp=2,tp=4,pp=2", (16, 16, 16)),
    ],
)
def test_a_rank_holds_its_share(layout: str, shares: tuple[int, int, int]) -> None:
    model, recipe = PRESETS["llama3-8b"], Recipe()
    whole = replica_states(model, recipe)
    held = rank_states(model, recipe, Layout.parse(layout))
    assert held == {name: size // share for (name, size), share in zip(whole.items(), shares, strict=True)}
