"""An exponential moving average of the weights (``recipe.ema``), kept beside the optimizer's states and sharded like
them.

It follows every update that was not refused, element by element, so it is the same in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from shoal.facts.optimizers import AVERAGE
from shoal.parallel.shards import Shard
from shoal.train.adamw import AdamW
from shoal.train.device_controlled import wide


class Follows(Protocol):
    """The network's weights, which follow the updated pieces."""

    def after_update(self) -> None: ...


class WeightAverage:
    """At least fp32: in bf16 all small steps of an average would be rounded away."""

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: list[Shard], decay: float) -> None:
        self.optimizer, self.pieces, self.decay = optimizer, pieces, decay
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Start from the weights that a run begins with."""
        if isinstance(self.optimizer, AdamW):
            self.optimizer.start()
        for piece in self.pieces:
            self.optimizer.state[piece.tensor][AVERAGE] = wide(piece.tensor.detach()).clone()

    @torch.no_grad()
    def follow(self, refused: Tensor) -> None:
        """Move towards the new weights, unless the update was refused."""
        for piece in self.pieces:
            average = self._of(piece)
            share = (~refused).to(average.dtype) * (1 - self.decay)
            average.lerp_(piece.tensor.detach().to(average.dtype), share)

    @contextmanager
    def in_use(self, placed: Follows) -> Iterator[None]:
        """Inside the context, the network uses the average as its weights."""
        kept = [piece.tensor.detach().clone() for piece in self.pieces]
        self._give(placed, [self._of(piece) for piece in self.pieces])
        try:
            yield
        finally:
            self._give(placed, kept)

    @torch.no_grad()
    def _give(self, placed: Follows, values: list[Tensor]) -> None:
        for piece, value in zip(self.pieces, values, strict=True):
            piece.tensor.copy_(value)
        placed.after_update()

    def _of(self, piece: Shard) -> Tensor:
        average: Tensor = self.optimizer.state[piece.tensor][AVERAGE]
        return average
