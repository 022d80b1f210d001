"""Split weight gradients from input gradients, for schedules that fill pipeline bubbles with them.

A projection's backward pass computes the gradient of its input, which the stage before is waiting for, and puts
its weight's gradient aside: two tensors and a multiplication that can be done at any later time. What is small
(norms, biases after a row split, embeddings) or at the end anyway (the head) is not put aside.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.models.linear import Linear, WeightGradient


class Deferred:
    """The weight gradients still to be computed, one heap for each (stage, micro-batch)."""

    def __init__(self) -> None:
        self.heaps: dict[tuple[int, int], list[WeightGradient]] = {}
        # Where a backward pass puts what it leaves; None: it leaves nothing.
        self.open: list[WeightGradient] | None = None

    def watch(self, module: nn.Module) -> None:
        """From now on the projections inside leave their weight gradients here whenever a heap is open."""
        # Whether a heap is open is a question for each backward pass; the compiler would ask once, while compiling.
        take = torch.compiler.disable(self.take)
        for child in module.modules():
            if isinstance(child, Linear):
                child.defer = take

    def begin(self, stage: int, micro: int) -> None:
        self.open = self.heaps[stage, micro] = []

    def take(self, one: WeightGradient) -> bool:
        if self.open is not None:
            self.open.append(one)
        return self.open is not None

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


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """As autograd does: in the type that the parameter's gradients add up in, which may be wider than its own."""
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype)
    else:
        parameter.grad += gradient
