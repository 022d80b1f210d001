"""What lies between an expert's way in, which is gate and up at once, and its way out: activation(gate) · up · weight.

Where a token's experts are here, its weight of each is multiplied with the narrow rows before the way out, and not with
the wide ones behind it: those need not be kept for the weight's gradient, nor read again. Kept is what the product gave
alone; what was made of it is made again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.models.mlp import ACTIVATIONS, DERIVATIVES


def gated(gate_up: Tensor, activation: str, weights: Tensor | None = None) -> Tensor:
    """[N, width] of gates and ups side by side [N, 2·width]; weights [N, 1], or one each."""
    inner: Tensor = _Gated.apply(gate_up, weights, activation)
    return inner


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, -1)
        inner = ACTIVATIONS[activation](gate) * up
        return inner if weights is None else inner * weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_up, weights = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        # As little at once as can be: a product takes the place of one of its factors.
        of_up, of_weights = ACTIVATIONS[ctx.activation](gate), None
        if weights is not None:
            of_weights = (of_up * up).mul_(gradient).sum(-1, keepdim=True)
            gradient = gradient * weights
        of_up.mul_(gradient)
        of_gate = DERIVATIVES[ctx.activation](gradient * up, gate)
        del gradient
        return torch.cat([of_gate, of_up], -1), of_weights, None
