"""Dropout whose mask is a pure function of sequence key, site, position and feature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.models import random


class Dropout(nn.Module):
    """Zeroes features with probability p at one named site, identically however the batch is split.

    A site's name is unique within a block; the noise passed to the block identifies the layer.
    """

    def __init__(self, name: str, p: float) -> None:
        super().__init__()
        self.name = name
        self.p = p
        self.salt = random.key(0, 0, name)
        # Hashes below this are dropped. An integer comparison makes p exact, without floating point.
        self.threshold = int(p * 2**64) - 2**63
        # With features split over tensor ranks: the first feature on this rank.
        self.first = 0

    def forward(self, x: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        """x [B, T, features], positions [B, T], noise [B]: one hashed key per sequence."""
        if self.p == 0 or noise is None:
            return x
        # A position is an index in the row: restarting it with each document would repeat masks.
        tokens = random.bits(noise[:, None] ^ self.salt, positions)
        scale = 1 / (1 - self.p)
        if torch.compiler.is_compiling():
            # Compiled into one kernel: the hashes stay in registers.
            features = torch.arange(self.first, self.first + x.shape[-1], device=x.device)
            kept = random.bits(tokens[:, :, None], features) >= self.threshold
            return torch.where(kept, x * scale, 0)
        dropped: Tensor = _Drop.apply(x, below(tokens, x.shape[-1], self.threshold, self.first), scale)
        return dropped

    def extra_repr(self) -> str:
        return f"{self.name!r}, p={self.p}"


class _Drop(torch.autograd.Function):
    """Saves the mask, one byte per feature: uncompiled, recomputing it takes far longer than reading it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * scale).masked_fill_(mask, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (gradient * ctx.scale).masked_fill_(mask, 0), None, None


# One operator, so that a dry run does not step through its many small ones.
@torch.library.custom_op("shoal::dropped", mutates_args=())
def below(tokens: Tensor, width: int, threshold: int, first: int = 0) -> Tensor:
    """Which of ``width`` features, from ``first`` on, of each token [B, T] are dropped: [B, T, width]."""
    mask = torch.empty(*tokens.shape, width, dtype=torch.bool, device=tokens.device)
    rows, keys = mask.view(-1, width), tokens.reshape(-1, 1)
    features = torch.arange(first, first + width, device=tokens.device)
    # A few rows at a time: the hashes, eight bytes per feature, stay in a cache.
    chunk = random.CHUNK_CPU if tokens.device.type == "cpu" else random.CHUNK
    at_once = max(1, chunk // width)
    for first in range(0, len(rows), at_once):
        some = slice(first, first + at_once)
        torch.lt(random.bits(keys[some], features), threshold, out=rows[some])
    return mask


@below.register_fake
def _(tokens: Tensor, width: int, threshold: int, first: int = 0) -> Tensor:
    return torch.empty(*tokens.shape, width, dtype=torch.bool, device=tokens.device)
