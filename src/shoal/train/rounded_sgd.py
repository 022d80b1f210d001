"""SGD for bf16 weights with stochastic rounding; torch's SGD rounds to nearest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.train.device_controlled import DeviceControlledOptimizer, wide, with_gradients
from shoal.train.rounding import parts


class RoundedSGD(DeviceControlledOptimizer):
    """With momentum, which is rounded to nearest because a step changes much of it. Weight decay is added to the
    gradient, as in torch.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for weight, group in with_gradients(self):
            for part in parts(weight.numel()):
                self._move(weight, part, group)

    def _move(self, weight: Tensor, part: slice, group: dict[str, Any]) -> None:
        """Adds and multiplies are separate, as in AdamW, so that bits do not depend on where a layout cuts."""
        buffer = self.state[weight].get("momentum_buffer")
        value = wide(weight.view(-1)[part])
        change = self.gradient(weight, part) + value * group["weight_decay"]
        if buffer is not None:
            kept = buffer.view(-1)[part]
            change += wide(kept) * group["momentum"]
            self.settle(kept, change)
        value -= change.mul_(group["lr"])
        del change
        self.settle_weight(weight, part, value)
