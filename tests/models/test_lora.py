"""Adapters: their product, who has gradients, how they begin."""

from __future__ import annotations

import math
from typing import Any

import peft
import torch
from torch import Tensor, nn

from shoal.facts.model import Adapters, Model
from shoal.facts.model.parameters import adapter_parameters, by_name, is_adapter, parameters
from shoal.facts.model.presets import PRESETS
from shoal.models.decoder import Network, build
from shoal.models.dropout import Dropout
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


POSITIONS, NOISE = torch.arange(40).expand(6, 40), torch.arange(100, 106)


def adapted(dropout: float, **changes: Any) -> Linear:
    adapters = ADAPTERS.model_copy(update={"dropout": dropout, **changes})
    model = PRESETS["tiny"].model_copy(update={"layers": 1, "adapters": adapters})
    linear = network(model).model.layers["0"].mlp.down_proj
    assert isinstance(linear, Linear) and linear.lora_B is not None
    linear.lora_B.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    return linear


def test_adapters_alone_read_what_dropout_leaves() -> None:
    """Against ``peft``'s own layer: the same without noise; with it, the same where both are given one mask."""
    linear = adapted(0.25)
    assert linear.lora_A is not None and linear.lora_B is not None and linear.lora_dropout is not None
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False).double()
    plain.weight.data.copy_(linear.weight)
    theirs = peft.tuners.lora.Linear(
        plain,
        "a",
        config=peft.LoraConfig(r=4, lora_alpha=6, lora_dropout=0.25),
        r=4,
        lora_alpha=6,
    ).double()
    theirs.lora_A["a"].weight.data.copy_(linear.lora_A.weight)
    theirs.lora_B["a"].weight.data.copy_(linear.lora_B.weight)
    x = torch.randn(6, 40, linear.in_features, dtype=torch.float64)
    assert torch.allclose(linear(x, POSITIONS, None), theirs.eval()(x), rtol=0, atol=1e-12)

    class SameMask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert linear.lora_dropout is not None
            dropped: Tensor = linear.lora_dropout(x, POSITIONS, NOISE)
            return dropped

    theirs.lora_dropout["a"] = SameMask()
    assert torch.allclose(linear(x, POSITIONS, NOISE), theirs.train()(x), rtol=0, atol=1e-12)
    # Its own mask has the same share and the same mean, over many tokens.
    ours = linear.lora_dropout(torch.ones_like(x), POSITIONS, NOISE)
    assert abs(float((ours == 0).double().mean()) - 0.25) < 0.005
    assert abs(float(ours.mean()) - 1) < 0.01


def test_a_part_of_the_features_has_its_part_of_the_mask() -> None:
    """As where tensor ranks split what a projection reads."""
    whole = adapted(0.4).lora_dropout
    assert whole is not None
    x = torch.randn(6, 40, 64, dtype=torch.float64)
    part = Dropout(whole.name, whole.p)
    part.first = 24
    assert torch.equal(part(x[..., 24:40], POSITIONS, NOISE), whole(x, POSITIONS, NOISE)[..., 24:40])


def test_every_projection_has_a_mask_of_its_own() -> None:
    adapters = ADAPTERS.model_copy(update={"dropout": 0.5, "targets": ("q_proj", "k_proj", "up_proj")})
    model = PRESETS["tiny"].model_copy(update={"layers": 1, "adapters": adapters})
    names = [one.name for one in network(model).modules() if isinstance(one, Dropout) and one.p]
    assert len(names) == len(set(names)) == 3


def test_dora_scales_what_is_left_of_the_adapter() -> None:
    linear = adapted(0.3, kind="dora")
    assert linear.lora_A is not None and linear.lora_B is not None and linear.lora_dropout is not None
    assert linear.lora_magnitude_vector is not None
    linear.lora_magnitude_vector.data.uniform_(1, 2, generator=torch.Generator().manual_seed(4))
    x = torch.randn(6, 40, linear.in_features, dtype=torch.float64)
    added = 1.5 * linear.lora_dropout(x, POSITIONS, NOISE) @ (linear.lora_B.weight @ linear.lora_A.weight).T
    lengths = (linear.weight + 1.5 * linear.lora_B.weight @ linear.lora_A.weight).norm(dim=1)
    expected = (x @ linear.weight.T + added) * linear.lora_magnitude_vector / lengths
    assert torch.allclose(linear(x, POSITIONS, NOISE), expected, rtol=0, atol=1e-11)


def test_a_model_without_adapters_is_written_as_before() -> None:
    model = PRESETS["tiny"]
    assert "adapters" not in model.model_dump(mode="json")
    with_them = model.model_copy(update={"adapters": ADAPTERS})
    assert Model.model_validate_json(with_them.model_dump_json()) == with_them
    assert with_them.base == model
