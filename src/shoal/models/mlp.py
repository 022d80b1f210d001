"""The MLP of a block, and of experts that every token uses."""

from __future__ import annotations

from collections.abc import Callable

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


class MLP(nn.Module):
    """Up, activation, down; gated: the activation of a second projection multiplies the first."""

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
