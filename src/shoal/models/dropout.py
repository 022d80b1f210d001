"""Dropout whose mask is a pure function of sequence key, site, position and feature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.models import random


class Dropout(nn.Module):
    """Zeroes features with probability p at one named site, the same ones however the batch is cut up.

    A name is unique within a block; the layer is part of the noise that the block is given.
    """

    def __init__(self, name: str, p: float) -> None:
        super().__init__()
        self.name = name
        self.p = p
        self.salt = random.key(0, 0, name)
        # Bits below this are dropped. An integer comparison makes p exact and needs no floating point.
        self.threshold = int(p * 2**64) - 2**63
        # Where tensor ranks split features: the first of those that are here.
        self.first = 0

    def forward(self, x: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        """x [B, T, features], positions [B, T], noise [B]: one hashed key for each sequence."""
        if self.p == 0 or noise is None:
            return x
        # A position is a place in the row: it does not start again with a document, or masks would repeat.
        tokens = random.bits(noise[:, None] ^ self.salt, positions)
        scale = 1 / (1 - self.p)
        if torch.compiler.is_compiling():
            # One kernel: the bits stay in its registers.
            features = torch.arange(self.first, self.first + x.shape[-1], device=x.device)
            kept = random.bits(tokens[:, :, None], features) >= self.threshold
            return torch.where(kept, x * scale, 0)
        dropped: Tensor = _Drop.apply(x, below(tokens, x.shape[-1], self.threshold, self.first), scale)
        return dropped

    def extra_repr(self) -> str:
        return f"{self.name!r}, p={self.p}"


class _Drop(torch.autograd.Function):
    """Keeps the mask, a byte a feature: operator by operator, making it again takes far longer than reading it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * scale).masked_fill_(mask, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (gradient * ctx.scale).masked_fill_(mask, 0), None, None


# One operator, so that a dry run does not go through its many small ones.
@torch.library.custom_op("shoal::dropped", mutates_args=())
def below(tokens: Tensor, width: int, threshold: int, first: int = 0) -> Tensor:
    """Which of ``width`` features, from ``first`` on, of each token [B, T] are dropped, [B, T, width]."""
    mask = torch.empty(*tokens.shape, width, dtype=torch.bool, device=tokens.device)
    rows, keys = mask.view(-1, width), tokens.reshape(-1, 1)
    features = torch.arange(first, first + width, device=tokens.device)
    # Some rows at a time: the bits, eight bytes a feature, stay in a cache.
    chunk = random.CHUNK_CPU if tokens.device.type == "cpu" else random.CHUNK
    at_once = max(1, chunk // width)
    for first in range(0, len(rows), at_once):
        some = slice(first, first + at_once)
        torch.lt(random.bits(keys[some], features), threshold, out=rows[some])
    return mask


@below.register_fake
def _(tokens: Tensor, width: int, threshold: int, first: int = 0) -> Tensor:
    return torch.empty(*tokens.shape, width, dtype=torch.bool, device=tokens.device)
