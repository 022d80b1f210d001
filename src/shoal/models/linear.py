"""Linear layers and embeddings whose parameters keep their dtype and are cast where they are used.

So fp32 parameters train in bf16 without autocast, gradients arrive in the parameter's dtype, and where the
dtypes already agree (FSDP's mixed precision casts whole groups) the cast costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Input, weight and bias in, all of one dtype; x·Wᵀ + b out.
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear(nn.Linear):
    """y = x·Wᵀ + b in the dtype of x."""

    def reset_parameters(self) -> None:
        """No values yet: ``initial.initialise`` or a checkpoint gives them."""

    # May be replaced from outside, as attention's ``attend`` may: some schedules compute weight gradients later.
    product: Product = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self.product(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Embedding):
    """A lookup whose result is in the compute dtype: here activations get the dtype they keep."""

    def __init__(self, count: int, width: int, compute: torch.dtype) -> None:
        super().__init__(count, width)
        self.compute = compute

    def reset_parameters(self) -> None:
        """As for ``Linear``."""

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index).to(self.compute)
