"""Split weight gradients from input gradients, for schedules that fill pipeline bubbles with them.

A projection's backward pass computes the gradient of its input, which the stage before is waiting for, and puts
its weight's gradient aside: two tensors and a multiplication that can be done at any later time. What is small
(norms, biases after a row split, embeddings) or at the end anyway (the head) is not put aside.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.linear import Linear


class Task(NamedTuple):
    """A weight gradient still to be computed."""

    module: Linear
    inputs: Tensor
    gradient: Tensor  # of the output
    with_bias: bool


class Deferred:
    """The weight gradients still to be computed, one heap for each (stage, micro-batch)."""

    def __init__(self) -> None:
        self.heaps: dict[tuple[int, int], list[Task]] = {}
        # Where a backward pass puts what it leaves; None: it leaves nothing.
        self.open: list[Task] | None = None

    def watch(self, module: nn.Module) -> None:
        """From now on the projections inside leave their weight gradients here whenever a heap is open."""
        for child in module.modules():
            if isinstance(child, Linear):
                child.product = partial(_product, self, child)

    def begin(self, stage: int, micro: int) -> None:
        self.open = self.heaps[stage, micro] = []

    def end(self) -> None:
        self.open = None

    @torch.no_grad()
    def compute(self, stage: int, micro: int) -> None:
        for module, inputs, gradient, with_bias in self.heaps.pop((stage, micro)):
            weight, bias = _gradients(inputs, gradient, with_bias)
            _accumulate(module.weight, weight)
            if bias is not None:
                _accumulate(module.bias, bias)


def _product(deferred: Deferred, module: Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = _Product.apply(x, weight, bias, deferred, module)
    return output


class _Product(torch.autograd.Function):
    """F.linear, whose backward pass may leave the weight's gradient for later."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: Deferred, module: Linear
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferred, ctx.module, ctx.with_bias = deferred, module, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        back = gradient @ weight
        heap = ctx.deferred.open
        if heap is not None:
            # Detached: with it the graph that made it would stay, and with that the stage's input.
            heap.append(Task(ctx.module, x.detach(), gradient, ctx.with_bias))
            return back, None, None, None, None
        return back, *_gradients(x, gradient, ctx.with_bias), None, None


def _gradients(inputs: Tensor, gradient: Tensor, with_bias: bool) -> tuple[Tensor, Tensor | None]:
    rows, wanted = inputs.flatten(0, -2), gradient.flatten(0, -2)
    return wanted.T @ rows, wanted.sum(0) if with_bias else None


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """As autograd does: in the type that the parameter's gradients add up in, which may be wider than its own."""
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype)
    else:
        parameter.grad += gradient
