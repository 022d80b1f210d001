"""The MLP of a block, and of shared experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.facts.model import Model
from shoal.models.linear import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}

# An activation's input gradient, from its output gradient and its input.
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": partial(torch.ops.aten.threshold_backward, threshold=0),
}


class MLP(nn.Module):
    """Up, activation, down; if gated, the activation of the gate projection multiplies up."""

    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(model.hidden, width, bias=model.mlp_bias) if model.gated else None
        self.up_proj = Linear(model.hidden, width, bias=model.mlp_bias)
        self.down_proj = Linear(width, model.hidden, bias=model.mlp_bias)
        self.activation = ACTIVATIONS[model.activation]

    def forward(self, x: Tensor, positions: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        if self.gate_proj is None:
            inner = self.activation(self.up_proj(x, positions, noise))
        else:
            inner = self.activation(self.gate_proj(x, positions, noise)) * self.up_proj(x, positions, noise)
        output: Tensor = self.down_proj(inner, positions, noise)
        return output
