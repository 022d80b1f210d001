"""Lion: every weight moves by the learning rate, in the direction of the sign of a mix of gradient and momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.facts.optimizers import LION_ELEMENTS
from shoal.train.device_controlled import DeviceControlledOptimizer, wide, with_gradients


class Lion(DeviceControlledOptimizer):
    """``betas``: the momentum's share in the direction, and the momentum's decay."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, lr=lr, betas=betas, weight_decay=0.0)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["exp_avg"] = torch.zeros_like(weight, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for weight, group in with_gradients(self):
            for start in range(0, weight.numel(), LION_ELEMENTS):
                self._move(weight, slice(start, start + LION_ELEMENTS), group)

    def _move(self, weight: Tensor, where: slice, group: dict[str, Any]) -> None:
        lr, (share, decay) = group["lr"], group["betas"]
        value, momentum = (one.view(-1)[where] for one in (weight, self.state[weight]["exp_avg"]))
        gradient = self.gradient(weight, where)
        moved = wide(value) * (1 - lr * group["weight_decay"])
        moved.sub_(torch.lerp(gradient, wide(momentum), share).sign_(), alpha=lr)
        self.settle_weight(weight, where, moved)
        del moved
        self.settle(momentum, torch.lerp(gradient, wide(momentum), decay))
