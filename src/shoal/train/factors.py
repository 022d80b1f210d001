"""Adafactor's means over rows and columns, as a rank keeps them: of all matrices that it updates some elements of.

They are of whole matrices, and so the same on every rank that keeps them: [matrices, rows] and [matrices, columns].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.facts.optimizers import AVERAGE, FACTORS, factor_shape
from shoal.models.initial import Slice
from shoal.parallel.shards import Shard
from shoal.train.steered import wide


def empty_state(piece: Shard, kind: str) -> Tensor:
    """Room for a state of a piece."""
    if kind not in FACTORS:
        like = wide(piece.tensor.detach()) if kind == AVERAGE else piece.tensor
        return torch.empty_like(like, requires_grad=False)
    length = factor_shape(piece.box.whole, kind)[-1]
    return piece.tensor.new_empty(len(piece.matrices), length, requires_grad=False)


def factor_slices(piece: Shard, state: Tensor, kind: str) -> Iterator[Slice]:
    """A state as a box of the means of the whole parameter: to be filled."""
    whole = factor_shape(piece.box.whole, kind)
    if len(whole) == 1:
        yield Slice(state[0], whole, (0,))
    else:
        yield Slice(state, whole, (piece.box.offset[0] + piece.matrices.start, 0))
