"""What our own optimizers share with torch's fused ones: clipping and refusal through two device tensors.

``grad_scale`` divides gradients, ``found_inf`` is 1 if nothing may change. Both are on the device, so the host does not
synchronise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.train.rounding import StochasticRounding, settle_weight


class DeviceControlledOptimizer(torch.optim.Optimizer):
    """Creates states at the start: created in the first update, they would be lost if that is refused."""

    found_inf: Tensor
    grad_scale: Tensor | None
    rounding: StochasticRounding | None = None

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self.found_inf, self.grad_scale = torch.zeros(()), None

    @property
    def refused(self) -> Tensor:
        return self.found_inf != 0

    def gradient(self, weight: Tensor, where: slice | None = None) -> Tensor:
        """The gradient as the update reads it: clipped, and at least fp32."""
        assert weight.grad is not None
        found = weight.grad if where is None else weight.grad.reshape(-1)[where]
        found = wide(found)
        return found if self.grad_scale is None else found / self.grad_scale

    def settle(self, old: Tensor, new: Tensor) -> None:
        """Set ``old`` to ``new``, unless the update is refused."""
        old.copy_(torch.where(self.refused, old, new.to(old.dtype)))

    def settle_weight(self, weight: Tensor, where: slice, new: Tensor) -> None:
        """The same for some elements of a weight, with stochastic rounding if configured."""
        old = weight.view(-1)[where]
        if self.rounding is None:
            self.settle(old, new)
        else:
            settle_weight(old, new, self.rounding.noise(weight).after(where.start), self.refused)


def with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The weights that an update changes, each with the options of its group."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                yield weight, group


def wide(values: Tensor) -> Tensor:
    """Values at least as wide as fp32."""
    return values.float() if values.dtype.itemsize < 4 else values
