"""Adapters: their product, who has gradients, how they begin."""

from __future__ import annotations

import math

import torch

from shoal.facts.model import Adapters, Model
from shoal.facts.model.parameters import adapter_parameters, by_name, is_adapter, parameters
from shoal.facts.model.presets import PRESETS
from shoal.models.decoder import Network, build
from shoal.models.initial import fill, whole
from shoal.models.linear import Linear
from shoal.models.lora import add_adapters

ADAPTERS = Adapters(rank=4, alpha=6.0, targets=("q_proj", "down_proj"))


def network(model: Model) -> Network:
    made = build(model, dtype=torch.float64, compute=torch.float64)
    assert model.adapters is not None
    add_adapters(made, model.adapters)
    made = made.to_empty(device="cpu")
    fill(((name, whole(name, one)) for name, one in made.named_parameters()), model, seed=3)
    return made


def test_only_adapters_have_gradients_and_they_are_those_of_the_product() -> None:
    model = PRESETS["tiny"].model_copy(update={"layers": 2, "adapters": ADAPTERS})
    made = network(model)
    trained = {name for name, one in made.named_parameters() if one.requires_grad}
    assert (
        trained == {one.name for one in adapter_parameters(model)} == {one.name for one in parameters(model)}
    )
    assert all(is_adapter(name) for name in trained)
    assert {name: tuple(one.shape) for name, one in made.named_parameters()}.items() <= {
        name: one.shape for name, one in by_name(model).items()
    }.items()

    linear = made.model.layers["1"].mlp.down_proj
    assert isinstance(linear, Linear) and linear.lora_A is not None and linear.lora_B is not None
    x = torch.randn(3, 5, linear.in_features, dtype=torch.float64)
    assert torch.equal(linear(x), x @ linear.weight.T)  # B begins at zero
    assert math.isclose(float(linear.lora_A.weight.detach().var()), 1 / (3 * linear.in_features), rel_tol=0.3)

    a, b = (factor.weight.detach().clone() for factor in (linear.lora_A, linear.lora_B))
    b.normal_()
    linear.lora_B.weight.data.copy_(b)
    a, b = a.requires_grad_(), b.requires_grad_()
    expected = x @ (linear.weight + 1.5 * b @ a).T  # alpha / rank
    assert torch.allclose(linear(x), expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (linear(x) * weights).sum().backward()
    assert linear.weight.grad is None
    for ours, theirs in ((linear.lora_A.weight, a), (linear.lora_B.weight, b)):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_model_without_adapters_is_written_as_before() -> None:
    model = PRESETS["tiny"]
    assert "adapters" not in model.model_dump(mode="json")
    with_them = model.model_copy(update={"adapters": ADAPTERS})
    assert Model.model_validate_json(with_them.model_dump_json()) == with_them
    assert with_them.base == model
