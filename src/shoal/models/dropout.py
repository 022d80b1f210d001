"""Dropout whose mask is a pure function of sequence key, site, position and feature."""

from __future__ import annotations

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

    def forward(self, x: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        """x [B, T, features], positions [B, T], noise [B]: one hashed key for each sequence."""
        if self.p == 0 or noise is None:
            return x
        # A position is a place in the row: it does not start again with a document, or masks would repeat.
        tokens = random.bits(noise[:, None] ^ self.salt, positions)
        features = torch.arange(x.shape[-1], device=x.device)
        kept = random.bits(tokens[:, :, None], features) >= self.threshold
        return torch.where(kept, x * (1 / (1 - self.p)), 0)

    def extra_repr(self) -> str:
        return f"{self.name!r}, p={self.p}"
