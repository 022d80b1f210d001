"""Split weight gradients from input gradients, for schedules that fill pipeline bubbles with them.

A projection's backward pass computes the gradient of its input, which the previous stage is waiting for, and defers its
weight gradient: two tensors and a matmul that can run at any later time. Small gradients (norms, biases after a row
split, embeddings) and those at the end anyway (the head) are not deferred.

The backward pass of a compiled block is one graph, which calls nothing in between. So the graph takes two extra inputs
for each projection, the carriers, which its forward pass does not read. Their "gradients" are the two tensors: autograd
hands them to the node that made the carriers, and that node defers the matmul or computes it at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.linear import Linear, WeightGradient


class Deferred:
    """The weight gradients still to be computed, one list for each (stage, micro-batch)."""

    def __init__(self, gathered: int = 1) -> None:
        """``gathered``: how many times the tokens of a block's input its projections read (sequence parallelism)."""
        self.gathered = gathered
        self.heaps: dict[tuple[int, int], list[WeightGradient]] = {}
        # Where the current backward pass defers its weight gradients to; None: it defers none.
        self.open: list[WeightGradient] | None = None

    def watch(self, module: nn.Module) -> None:
        """Make the projections inside defer their weight gradients whenever a list is open."""
        # Whether a list is open changes between backward passes; the compiler would check it only once, while tracing.
        take = torch.compiler.disable(self.take)
        for child in module.modules():
            if isinstance(child, Linear):
                child.defer = take

    def carriers(self, module: nn.Module, tokens: int) -> tuple[list[Linear], tuple[Tensor, ...]]:
        """The projections inside that train, and two carriers for each; empty where no gradients are computed.

        ``tokens``: of the block's input.
        """
        if not torch.is_grad_enabled():
            return [], ()
        inside = [child for child in module.modules() if isinstance(child, Linear)]
        trained = [linear for linear in inside if linear.weight.requires_grad]
        if not trained:
            return [], ()
        rows = tokens * self.gathered
        return trained, _Carriers.apply(self, trained, rows, *(linear.weight for linear in trained))

    def begin(self, stage: int, micro: int) -> None:
        self.open = self.heaps[stage, micro] = []

    def take(self, one: WeightGradient) -> bool:
        if self.open is not None:
            self.open.append(one)
        return self.open is not None

    def left(self, linear: Linear, x: Tensor | None, gradient: Tensor | None) -> Tensor | None:
        """The weight gradient of what a graph left, unless it is deferred or the graph had no use of the projection."""
        if x is None or gradient is None:
            return None
        rest = WeightGradient(linear, x, gradient, with_bias=False)
        return None if self.take(rest) else rest.compute()[0]

    def end(self) -> None:
        self.open = None

    @torch.no_grad()
    def compute(self, stage: int, micro: int) -> None:
        for one in self.heaps.pop((stage, micro)):
            weight, bias = one.compute()
            if weight is not None:
                _accumulate(one.linear.weight, weight)
            if bias is not None:
                _accumulate(one.linear.bias, bias)


class _Carriers(torch.autograd.Function):
    """Makes the carriers, which hold one value each. Its backward pass receives what a graph's left in them."""

    @staticmethod
    def forward(
        ctx: Any, deferred: Deferred, linears: list[Linear], rows: int, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.deferred, ctx.linears = deferred, linears
        widths = [width for weight in weights for width in reversed(weight.shape)]
        return tuple(weights[0].new_zeros(1).expand(rows, width) for width in widths)

    @staticmethod
    def backward(ctx: Any, *left: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *map(ctx.deferred.left, ctx.linears, left[::2], left[1::2])


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate as autograd does: in the parameter's ``grad_dtype``, which may be wider than its own dtype."""
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype)
    else:
        parameter.grad += gradient
