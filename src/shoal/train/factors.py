"""Optimizer states that do not have one value per element of a piece.

Adafactor's row and column means cover every matrix of which the rank updates some elements. They are means of whole
matrices, so they are the same on every rank that keeps them: [matrices, rows] and [matrices, columns]. Block scales
(``facts/blockwise.py``) cover a rank's own blocks, in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.facts.blockwise import SCALE_OF, SCALES, block_length
from shoal.facts.optimizers import AVERAGE, FACTORS, factor_shape
from shoal.facts.stored_states import Keeps
from shoal.models.initial import Slice
from shoal.parallel.shards import Shard, in_blocks, piece_slices
from shoal.train.device_controlled import wide


def empty_state(piece: Shard, kind: str, keeps: Keeps | None = None) -> Tensor:
    """Allocate a state of a piece."""
    if kind in SCALES:
        count = (piece.stop - piece.start) // (block_length(piece.box.whole) or 1)
        return piece.tensor.new_empty(count, dtype=torch.uint8, requires_grad=False)
    if keeps is not None and keeps.blockwise and kind in SCALE_OF:
        blocks = keeps.has_blocks(piece.name, len(piece.box.whole))
        dtype = torch.uint8 if blocks else torch.float32
        return torch.empty_like(piece.tensor, dtype=dtype, requires_grad=False)
    if kind not in FACTORS:
        like = wide(piece.tensor.detach()) if kind == AVERAGE else piece.tensor
        return torch.empty_like(like, requires_grad=False)
    length = factor_shape(piece.box.whole, kind)[-1]
    return piece.tensor.new_empty(len(piece.matrices), length, requires_grad=False)


def factor_slices(piece: Shard, state: Tensor, kind: str) -> Iterator[Slice]:
    """A state as boxes of the whole parameter's means or scales, to be filled."""
    if kind in SCALES:
        yield from piece_slices(in_blocks(piece), state)
        return
    whole = factor_shape(piece.box.whole, kind)
    if len(whole) == 1:
        yield Slice(state[0], whole, (0,))
    else:
        yield Slice(state, whole, (piece.box.offset[0] + piece.matrices.start, 0))
