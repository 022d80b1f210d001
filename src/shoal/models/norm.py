"""Normalisation in at least fp32, whatever the dtype of the activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.facts.model import Model


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight, rounded to x's dtype before the weight, as in Hugging Face.

    With an offset it is · (1 + weight), rounded afterwards, as in Gemma: its weights lie around zero, where floats are
    finer than around one.
    """

    def __init__(self, width: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (scaled * (1 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight.to(x.dtype) * scaled.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """torch's, whose kernels accumulate in fp32 already; only the weights are cast to x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(
            x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps
        )


def block_norm(model: Model) -> RMSNorm | LayerNorm:
    """The norm of a model's blocks on the residual stream."""
    if model.norm == "rms":
        return RMSNorm(model.hidden, model.norm_eps, model.norm_offset)
    return LayerNorm(model.hidden, model.norm_eps)
