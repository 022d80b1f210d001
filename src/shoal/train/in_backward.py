"""Updates in the backward pass (``tune.optimizer_in_backward``): a gradient is used up as soon as it is complete.

So there is never more of them than of a unit or a bucket, or without data ranks of one parameter. Nothing can be
decided by all gradients before the first update: no clipping, and what is not finite leaves its own parameter alone and
ends the run. A parameter has an optimizer of its own, whose states are also those of the whole one: checkpoints and
guards see no difference.
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
        """``optimizer``: of all pieces, which has their states and makes no update."""
        self.recipe, self.step, self.lr = recipe, 0, 0.0
        self.pieces = placed.gradients.pieces
        self.optimizers: dict[Shard, torch.optim.Optimizer] = {}
        for piece in self.pieces:
            one = self.optimizers[piece] = build([piece], recipe)
            one.state = optimizer.state
        self.writes_copies = all(map(writes_copies, self.optimizers.values()))
        placed.take_early(self.take)

    def begin(self, step: int) -> float:
        """A step's learning rate, from now on that of all."""
        self.step, self.lr = step, learning_rate(self.recipe, step)
        for piece, one in self.optimizers.items():
            piece.squares = None
            set_learning_rate(one, self.lr)
        return self.lr

    @torch.no_grad()
    def take(self, piece: Shard, found: Tensor) -> None:
        """Update with a gradient that is complete."""
        piece.tensor.grad = found.detach().to(piece.tensor.grad_dtype).view_as(piece.tensor)
        piece.squares = squared_norm([piece], piece.tensor.device)
        norm = piece.squares.sqrt()
        clip_and_update(self.optimizers[piece], [piece], norm, 0.0, math.inf, self.step)
        piece.tensor.grad = None

    def finish(self) -> None:
        """Update what was not given early: other ranks' gradients have been added by now."""
        for piece in self.pieces:
            if piece.squares is None:
                self.take(piece, gradient(piece))
