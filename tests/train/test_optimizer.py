"""Groups, clipping and the loss scale."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.facts.layout import Layout
from shoal.facts.layout.parameter_groups import DENSE, parameter_groups
from shoal.facts.model.tensor_split import Box, TensorPart
from shoal.facts.recipe import Recipe
from shoal.parallel.shards import HeldParameter, Shard
from shoal.train.optimizer import LossScale, build, clip_and_update, squared_norm, unscale

ALONE = parameter_groups(Layout(), experts=False, lora=False)[DENSE]


def piece_of(parameter: torch.nn.Parameter, name: str = "") -> Shard:
    """All of a parameter."""
    box = Box(tuple(parameter.shape), (0,) * parameter.dim(), tuple(parameter.shape))
    held = HeldParameter(name, 0, parameter, TensorPart(box), ALONE, copied=False)
    return Shard(held, parameter, 0, parameter.numel(), counted=True)


def test_norms_and_biases_are_not_decayed() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Embedding(5, 4))
    pieces = [piece_of(parameter, name) for name, parameter in network.named_parameters()]
    decayed, plain = build(pieces, Recipe(weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3 and [tuple(p.shape) for p in decayed["params"]] == [(4, 4), (5, 4)]
    assert plain["weight_decay"] == 0.0 and len(plain["params"]) == 3
    assert decayed["fused"] is True


def test_a_flat_piece_of_a_matrix_is_decayed() -> None:
    """Where states are sharded a piece is a range of elements: what it is a part of decides."""
    whole = torch.nn.Parameter(torch.zeros(4, 6))
    held = HeldParameter("", 0, whole, TensorPart(Box((4, 6), (0, 0), (4, 6))), ALONE, copied=False)
    flat = Shard(held, torch.nn.Parameter(torch.zeros(9)), 3, 12, counted=True)
    (decayed,) = build([flat], Recipe(weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3 and decayed["params"] == [flat.tensor]


CPU = torch.device("cpu")


def norm_of(pieces: list[Shard]) -> torch.Tensor:
    return squared_norm(pieces, CPU).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0])
def test_clipping_is_torchs(limit: float, scale: float, dtype: torch.dtype) -> None:
    ours = [
        torch.nn.Parameter(torch.zeros(3, 3, dtype=dtype)),
        torch.nn.Parameter(torch.zeros(5, dtype=dtype)),
    ]
    theirs = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in ours]
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        gradient = torch.arange(mine.numel(), dtype=dtype).reshape(mine.shape) + number
        mine.grad, other.grad = gradient * scale, gradient.clone()
    pieces = [piece_of(parameter) for parameter in ours]
    unscale(pieces, scale)
    norm = norm_of(pieces)
    clip_and_update(build(pieces, Recipe(lr=1.0)), pieces, norm, limit, math.inf)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, limit or float("inf"))
    build([piece_of(parameter) for parameter in theirs], Recipe(lr=1.0)).step()
    assert float(norm) == pytest.approx(float(wanted))
    eps = torch.finfo(dtype).eps
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=4 * eps, atol=0)
        assert torch.allclose(mine, other, rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("gradient", "most"), [(math.nan, math.inf), (math.inf, math.inf), (1.0, 0.5)])
def test_a_refused_gradient_changes_nothing(optimizer: str, gradient: float, most: float) -> None:
    """Not in the very first update either, which is when torch makes the states."""
    parameter, other = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    pieces, recipe = [piece_of(parameter)], Recipe(lr=0.1, optimizer=optimizer)
    made = build(pieces, recipe)
    parameter.grad = torch.tensor([gradient, 0.0, 0.0, 0.0])
    clip_and_update(made, pieces, norm_of(pieces), 1.0, most)
    assert torch.equal(parameter, torch.ones(4))
    untouched = build([piece_of(other)], recipe)
    for one, update in ((parameter, made), (other, untouched)):
        one.grad = torch.tensor([0.3, -0.2, 0.0, 0.1])
        clip_and_update(update, [piece_of(one)], norm_of([piece_of(one)]), 1.0, math.inf)
    assert torch.equal(parameter, other) and not torch.equal(parameter, torch.ones(4))


def test_a_refused_gradient_still_tells_whose_fault_it_is() -> None:
    """In fp64, which is clipped in a pass of its own: a sound gradient beside a spoilt one stays sound."""
    spoilt, sound = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    spoilt.grad, sound.grad = torch.full_like(spoilt, math.nan), torch.full_like(sound, 0.5)
    pieces = [piece_of(spoilt), piece_of(sound)]
    clip_and_update(build(pieces, Recipe(lr=0.1)), pieces, norm_of(pieces), 1.0, math.inf)
    assert torch.equal(sound.grad, torch.full_like(sound, 0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_has_at_least_fp32s_precision(dtype: torch.dtype) -> None:
    """In bf16 a sum of squares is right to two digits, and so is what gradients are clipped to."""
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (1000, 3, 77)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.linspace(0.1, 1 + number, parameter.numel()).to(dtype)
    pieces = [piece_of(parameter) for parameter in parameters]
    squares = sum(float(parameter.grad.double().square().sum()) for parameter in parameters)
    assert float(squared_norm(pieces, CPU)) == pytest.approx(squares, rel=1e-6)
    norm = math.sqrt(squares)
    wanted = [(parameter.grad.double() / norm).to(dtype) for parameter in parameters]
    clip_and_update(build(pieces, Recipe()), pieces, torch.tensor(norm, dtype=torch.float64), 1.0, math.inf)
    for parameter, value in zip(parameters, wanted, strict=True):
        assert torch.allclose(parameter.grad, value, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_the_loss_scale_follows_torchs_grad_scaler() -> None:
    ours = LossScale.for_precision("fp16")
    ours.patience = 3
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflow in (True, True, False, False, False, False, True, False, False, False, False, False, False):
        theirs.scale(parameter.sum()).backward()
        parameter.grad = torch.full_like(parameter, float("inf") if overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        assert ours.value == theirs.get_scale()


def test_other_precisions_are_not_scaled() -> None:
    scale = LossScale.for_precision("bf16")
    scale.update(overflow=True)
    assert scale.value == 1.0


def test_a_rank_may_hold_nothing() -> None:
    optimizer = build([], Recipe())
    optimizer.step()
    assert float(squared_norm([], CPU)) == 0.0
