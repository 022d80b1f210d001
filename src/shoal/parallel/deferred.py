"""Split weight gradients from input gradients, for schedules that fill pipeline bubbles with them.

A projection's backward pass computes the gradient of its input, which the previous stage is waiting for, and defers its
weight gradient: two tensors and a matmul that can run at any later time. Small gradients (norms, biases after a row
split, embeddings) and those at the end anyway (the head) are not deferred.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.models.linear import Linear, WeightGradient


class Deferred:
    """The weight gradients still to be computed, one list for each (stage, micro-batch)."""

    def __init__(self) -> None:
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
    """Accumulate as autograd does: in the parameter's ``grad_dtype``, which may be wider than its own dtype."""
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype)
    else:
        parameter.grad += gradient
