"""What is applied to a projection from outside adds up: in any order, none is lost, and all equal one process."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from tests.parallel.sharding import GPT2, SMALL, Case, Part, assert_equal, train
from tests.ranks import run_ranks
from torch import Tensor, nn

from shoal.facts.model import Model
from shoal.models.linear import Linear
from shoal.models.mlp import MLP
from shoal.parallel.compile import checkpointed
from shoal.parallel.deferred import Deferred
from shoal.parallel.tensor_region import TensorRegion


class RoundedProduct:
    """As a product in fp8 would: its operands have few digits, here with double precision everywhere else."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, scales: object) -> Tensor:
        output = rounded(x) @ rounded(weight).T
        return output if bias is None else output + bias

    def input_gradient(self, gradient: Tensor, weight: Tensor, scales: object) -> Tensor:
        return gradient @ rounded(weight)

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.T @ rounded(x)


def rounded(operand: Tensor) -> Tensor:
    return operand.to(torch.float8_e4m3fn).to(operand.dtype)


def round_products(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, Linear):
            child.product = RoundedProduct()


def train_counting(rank: int, world: int, case: Case) -> tuple[list[Part], int]:
    """With the number of weight gradients that were computed apart from their backward pass."""
    found = 0
    compute = Deferred.compute

    def counted(self: Deferred, stage: int, micro: int) -> None:
        nonlocal found
        found += len(self.heaps[stage, micro])
        compute(self, stage, micro)

    # For this rank's process alone, which ends with the test.
    Deferred.compute = counted  # type: ignore[method-assign]
    return train(rank, world, case), found


ZERO_BUBBLE = "tp=2,pp=2,schedule=zb"


@pytest.mark.parametrize(
    "case",
    [
        Case(ZERO_BUBBLE, transform=round_products),
        Case(ZERO_BUBBLE, GPT2, transform_placed=round_products),
    ],
    ids=["product, tp, deferred", "tp, deferred, product"],
)
def test_another_product_under_tensor_ranks_and_deferred_weight_gradients(case: Case) -> None:
    ranks = run_ranks(4, train_counting, case)
    assert_equal(case, [parts for parts, _ in ranks])
    projections = 7 if case.model.gated else 6
    tensor_ranks, micro_batches, steps = 2, case.micro_batches, 2
    expected = case.model.layers * projections * tensor_ranks * micro_batches * steps
    assert sum(found for _, found in ranks) == expected


class LowRank(nn.Module):
    """(x·Aᵀ)·Bᵀ"""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.down, self.up = projection(down), projection(up)


def projection(weight: Tensor, bias: Tensor | None = None) -> Linear:
    made = Linear(weight.shape[1], weight.shape[0], bias is not None)
    made.weight = nn.Parameter(weight.clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.clone())
    return made


def number(*shape: int) -> Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + len(shape)).view(shape)


INPUTS, OUTPUTS, RANK = 8, 6, 2
X, OUT = number(2, 3, INPUTS), number(2, 3, OUTPUTS).cos()
WEIGHT, BIAS = number(OUTPUTS, INPUTS), number(OUTPUTS)
DOWN, UP = number(RANK, INPUTS).cos(), number(OUTPUTS, RANK)


@dataclass(frozen=True)
class Seen:
    """The output of a projection, and all gradients."""

    tensors: dict[str, Tensor]
    deferred: int


def run(
    order: tuple[str, ...], kind: str = "whole", stream: TensorRegion | None = None, frozen: bool = True
) -> Seen:
    """A projection with the transforms applied in that order. ``kind``: how tensor ranks split it."""
    index = slice(None)
    if stream is not None:
        share = (INPUTS if kind == "row" else OUTPUTS) // stream.ranks
        index = slice(stream.index * share, (stream.index + 1) * share)
    column, row = (index, slice(None)) if kind == "column" else (slice(None), index)
    linear = projection(WEIGHT[column, row], BIAS[column])
    pair = LowRank(DOWN[:, row], UP[column])
    deferred = Deferred()

    def pair_beside() -> None:
        linear.weight.requires_grad_(not frozen)
        linear.lora_A, linear.lora_B = pair.down, pair.up
        if linear.defer is not None:  # a strategy that adds projections has them watched like the others
            deferred.watch(pair)

    transforms = {
        "product": lambda: setattr(linear, "product", RoundedProduct()),
        "pair": pair_beside,
        "defer": lambda: deferred.watch(linear),
        "split": lambda: setattr(linear, "reduce", stream.leave) if kind == "row" and stream else None,
    }
    for name in order:
        transforms[name]()
    x = X[..., row].clone().requires_grad_()
    output = linear(x if stream is None or kind == "row" else stream.enter(x))
    deferred.begin(0, 0)
    output.backward(OUT[..., column])
    deferred.end()
    waiting = len(deferred.heaps[0, 0])
    assert (pair.down.weight.grad is None) == ("defer" in order)
    deferred.compute(0, 0)
    found = {
        "output": output.detach(),
        "x": x.grad,
        "weight": linear.weight.grad,
        "bias": linear.bias.grad,
        "down": pair.down.weight.grad,
        "up": pair.up.weight.grad,
    }
    return Seen({name: tensor for name, tensor in found.items() if tensor is not None}, waiting)


def every_order(rank: int, world: int, kind: str, frozen: bool) -> list[Seen]:
    assert dist.group.WORLD is not None
    stream = TensorRegion(dist.group.WORLD, world, rank, sp=False)
    found = []
    for order in permutations(["product", "pair", "defer", "split"]):
        seen = run(order, kind, stream, frozen)
        # What every rank computes a part of is for the engine to sum, once a step (``parallel.shared``).
        dist.all_reduce(seen.tensors["up" if kind == "row" else "down"])
        found.append(seen)
    return found


# Where in the whole tensor a rank's part is: its dimension, for each kind of split.
SPLIT = {
    "row": {"x": 2, "weight": 1, "down": 1},
    "column": {"output": 2, "weight": 0, "bias": 0, "up": 0},
}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", ["row", "column"])
def test_low_rank_pair_product_deferral_and_split_in_every_order(kind: str, frozen: bool) -> None:
    whole = run(("product", "pair"), frozen=frozen).tensors
    assert ("weight" in whole) != frozen
    plain = run(("pair",)).tensors
    assert (whole["output"] - plain["output"]).abs().max() > 1e-3  # what is compared can tell the two apart
    for every in zip(*run_ranks(2, every_order, kind, frozen), strict=True):
        # The pair's first, and the projection's weight and bias: but a bias that follows a sum is not put aside.
        assert {seen.deferred for seen in every} == {1 if kind == "row" and frozen else 2}
        for name, expected in whole.items():
            parts = [seen.tensors[name] for seen in every]
            dimension = SPLIT[kind].get(name)
            found = parts[0] if dimension is None else torch.cat(parts, dimension)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_second_transform_of_one_kind_is_refused() -> None:
    linear = projection(WEIGHT)
    linear.product = first = RoundedProduct()
    with pytest.raises(RuntimeError, match=r"product is .*RoundedProduct"):
        linear.product = RoundedProduct()
    assert linear.product is first
    Deferred().watch(linear)
    with pytest.raises(RuntimeError, match="defer is"):
        Deferred().watch(linear)
    untouched = projection(WEIGHT)
    assert untouched.defer is None and type(untouched.product) is not RoundedProduct


def test_a_frozen_projection_keeps_no_input_and_leaves_nothing() -> None:
    linear, deferred = projection(WEIGHT).requires_grad_(False), Deferred()
    deferred.watch(linear)
    x = X.clone().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        output = linear(x)
    assert [one.shape for one in kept] == [linear.weight.shape]
    deferred.begin(0, 0)
    output.backward(OUT)
    assert deferred.heaps == {(0, 0): []} and x.grad is not None


def test_compiled_around_all_of_them() -> None:
    """The compiler must neither take a weight gradient back that is deferred, nor miss a slot that is filled later."""
    torch.compiler.reset()

    def gradients(compiled: bool, watched: bool) -> tuple[list[Tensor], int]:
        mlp, deferred = MLP(Model(**SMALL), SMALL["ffn"]).double(), Deferred()
        for parameter in mlp.parameters():
            parameter.data = number(*parameter.shape)
        pair = LowRank(number(RANK, 12), number(20, RANK))
        mlp.up_proj.lora_A, mlp.up_proj.lora_B = pair.down, pair.up
        run = torch.compile(checkpointed, backend="aot_eager", fullgraph=True) if compiled else checkpointed
        round_products(mlp)
        if watched:
            deferred.watch(mlp)
        carried = deferred.carriers(mlp, 6) if compiled and watched else ([], ())
        output = run("none", MLP.forward, mlp, *carried, number(2, 3, 12))
        deferred.begin(0, 0)
        output.sum().backward()
        waiting = len(deferred.heaps[0, 0])
        deferred.compute(0, 0)
        return [parameter.grad for parameter in mlp.parameters() if parameter.grad is not None], waiting

    expected, _ = gradients(compiled=False, watched=False)
    for watched in (False, True):
        found, waiting = gradients(compiled=True, watched=watched)
        assert waiting == (4 if watched else 0)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
