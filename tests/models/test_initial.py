from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from shoal.facts.model import Model
from shoal.models.decoder import Network, build
from shoal.models.initial import Slice, initialise

WIDE = {"hidden": 128, "ffn": 256, "vocab": 300, "head_dim": 32}


def test_every_parameter_has_its_distribution(
    shape: Callable[..., Model], network: Callable[..., Network]
) -> None:
    model = shape(**WIDE, qk_norm=True, norm="layer", qkv_bias=True, positions="learned", max_positions=128)
    for name, parameter in network(model).state_dict().items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            residual = "o_proj" in name or "down_proj" in name
            std = 0.02 / math.sqrt(4) if residual else 0.02
            assert abs(float(parameter.std()) / std - 1) < 0.03, name
            assert abs(float(parameter.mean())) < std * 0.05, name


def test_names_seeds_and_nothing_else_decide(
    shape: Callable[..., Model], network: Callable[..., Network]
) -> None:
    model = shape()
    first, again, other = network(model), network(model), network(model)
    initialise(other, model, seed=2)
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), again.parameters(), strict=True))
    weights = first.state_dict()
    name = "model.layers.{}.self_attn.q_proj.weight"
    assert not torch.equal(weights[name.format(0)], weights[name.format(1)])
    assert not torch.equal(weights[name.format(0)], other.state_dict()[name.format(0)])
    # A deeper network begins with the same embedding: no number depends on what was drawn before it.
    deeper = network(shape(layers=5)).state_dict()
    assert torch.equal(weights["model.embed_tokens.weight"], deeper["model.embed_tokens.weight"])


def test_a_slice_is_the_slice_of_the_whole(
    shape: Callable[..., Model], network: Callable[..., Network]
) -> None:
    model = shape()
    whole = network(model).state_dict()
    sliced = build(model).to_empty(device="cpu")
    pieces: dict[str, torch.Tensor] = {}

    def lower_half(name: str, parameter: nn.Parameter) -> Slice:
        start = parameter.shape[0] // 2
        pieces[name] = torch.empty_like(parameter[start:])
        return Slice(pieces[name], tuple(parameter.shape), (start, *[0] * (parameter.dim() - 1)))

    initialise(sliced, model, 1, lower_half)
    assert set(pieces) == set(whole)
    assert all(torch.equal(piece, whole[name][len(whole[name]) // 2 :]) for name, piece in pieces.items())
