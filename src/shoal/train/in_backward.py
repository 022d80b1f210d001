"""Optimizer updates in the backward pass (``tune.optimizer_in_backward``): a gradient is used as soon as it is
complete.

So gradients never take more memory than one unit or bucket, or without data ranks one parameter. No decision can depend
on all gradients: there is no clipping, and a non-finite gradient leaves its own parameter unchanged and ends the run.
Each parameter has its own optimizer whose states are shared with the overall one, so checkpoints and guards see no
difference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.facts.recipe import Recipe
from shoal.parallel.placed import Placed
from shoal.parallel.shards import Shard, gradient
from shoal.train.optimizer import (
    build,
    clip_and_update,
    learning_rate,
    set_learning_rate,
    squared_norm,
    writes_copies,
)


class UpdatesInBackward:
    def __init__(self, placed: Placed, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
        """``optimizer`` covers all pieces and holds their states, but makes no update itself."""
        self.recipe, self.step, self.lr = recipe, 0, 0.0
        self.pieces = placed.gradients.pieces
        self.optimizers: dict[Shard, torch.optim.Optimizer] = {}
        for piece in self.pieces:
            one = self.optimizers[piece] = build([piece], recipe)
            one.state = optimizer.state
        self.writes_copies = all(map(writes_copies, self.optimizers.values()))
        placed.take_early(self.take)

    def begin(self, step: int) -> float:
        """Set the step's learning rate on all optimizers and return it."""
        self.step, self.lr = step, learning_rate(self.recipe, step)
        for piece, one in self.optimizers.items():
            piece.squares = None
            set_learning_rate(one, self.lr)
        return self.lr

    @torch.no_grad()
    def take(self, piece: Shard, found: Tensor) -> None:
        """Update with a complete gradient."""
        piece.tensor.grad = found.detach().to(piece.tensor.grad_dtype).view_as(piece.tensor)
        piece.squares = squared_norm([piece], piece.tensor.device)
        norm = piece.squares.sqrt()
        clip_and_update(self.optimizers[piece], [piece], norm, 0.0, math.inf, self.step)
        piece.tensor.grad = None

    def finish(self) -> None:
        """Update the pieces not handed over early, to which other ranks' gradients have now been added."""
        for piece in self.pieces:
            if piece.squares is None:
                self.take(piece, gradient(piece))
