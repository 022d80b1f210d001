"""Which boxes of which tensors a rank writes, so that every element is written exactly once.

Ranks that hold the same elements (replicas of ``dp``) split the work: each writes an equal share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from shoal.facts.blockwise import SCALES
from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import View, intersect, views_by_parameter
from shoal.facts.optimizers import factor_shape
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import Shard, in_blocks, piece_boxes

# In elements: larger pieces are cut, so that several threads can hash and read one tensor, with little memory each.
LARGEST_PIECE = 1 << 23


@dataclass(frozen=True)
class WrittenBox:
    """A box of one of Hugging Face's tensors, and where its elements are in a piece."""

    piece: Shard
    start: int  # of a range of the piece that, as ``shape``, is a box of our parameter
    shape: tuple[int, ...]
    within: tuple[slice, ...]  # the part of that box to write
    view: View
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, values: Tensor) -> Tensor:
        """This box, in Hugging Face's layout, from a tensor with one value per element of the piece."""
        flat = values.detach().reshape(-1)[self.start : self.start + math.prod(self.shape)]
        box = flat.view(self.shape)[self.within]
        return box[0] if self.view.stacked else box.T if self.view.transposed else box

    @property
    def tensor(self) -> str:
        return self.view.tensor


def parts(model: Model, pieces: list[Shard], mesh: Mesh) -> list[WrittenBox]:
    """What this rank writes of every state."""
    return parts_by_views(views_by_parameter(model), pieces, mesh)


def parts_by_views(
    of_parameter: Mapping[str, list[View]], pieces: list[Shard], mesh: Mesh
) -> list[WrittenBox]:
    """The same, with explicit views of parameters in the checkpoint's tensors."""
    return [
        part
        for piece, start, stop in _shared_out(pieces, mesh)
        for first, last in _cut(piece, start, stop)
        for part in _parts(piece, first, last, of_parameter[piece.name])
    ]


def factor_parts(pieces: list[Shard], state: str) -> list[WrittenBox]:
    """What this rank writes of Adafactor's means: those of matrices whose first element it updates; and of scales:
    those of its own blocks.
    """
    if state in SCALES:
        return [part for piece in pieces if piece.counted and piece.decayed for part in _scale_parts(piece)]
    found = []
    for piece in pieces:
        if not piece.counted or not piece.matrices or any(piece.box.offset[-2:]):
            continue
        size = math.prod(piece.box.shape[-2:])
        first, stop = -(-piece.start // size), -(-piece.stop // size)
        if first >= stop:
            continue
        whole = factor_shape(piece.box.whole, state)
        stacked = len(whole) > 1
        shape = (stop - first, *whole[1:]) if stacked else whole
        offset = (piece.box.offset[0] + first, *(0 for _ in whole[1:])) if stacked else (0,)
        begin = (first - piece.matrices.start) * whole[-1]
        view = View(piece.name, (0,) * len(whole), piece.name, (0,) * len(whole), whole)
        within = tuple(slice(0, one) for one in shape)
        found.append(WrittenBox(piece, begin, shape, within, view, offset, shape))
    return found


def _scale_parts(piece: Shard) -> Iterator[WrittenBox]:
    blocks = in_blocks(piece)
    whole = blocks.box.whole
    view = View(piece.name, (0,) * len(whole), piece.name, (0,) * len(whole), whole)
    for (offset, shape), begin in piece_boxes(blocks, 0, blocks.stop - blocks.start):
        within = tuple(slice(0, one) for one in shape)
        yield WrittenBox(piece, begin, shape, within, view, offset, shape)


def _shared_out(pieces: list[Shard], mesh: Mesh) -> Iterator[tuple[Shard, int, int]]:
    """The ranges of its pieces that this rank writes: its share of what other replicas also hold."""
    written = [piece for piece in pieces if piece.held.part.copy == 0 and not piece.held.copied]
    for replicas in dict.fromkeys(piece.held.group.replicated for piece in written):
        alike = [piece for piece in written if piece.held.group.replicated == replicas]
        total, index = sum(piece.stop - piece.start for piece in alike), mesh.index_in(replicas)
        first, last = total * index // replicas.size, total * (index + 1) // replicas.size
        before = 0
        for piece in alike:
            size = piece.stop - piece.start
            start, stop = max(first - before, 0), min(last - before, size)
            if start < stop:
                yield piece, start, stop
            before += size


def _cut(piece: Shard, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split a long range, between rows where rows are shorter than a piece."""
    width = piece.box.size // piece.box.shape[0] if piece.box.shape else 1
    most = max(LARGEST_PIECE // width * width, width) if width < stop - start else LARGEST_PIECE
    row = piece.start % width
    while start < stop:
        # Counted from the beginning of the row in which the range starts.
        end = min(stop, (start + row) // most * most + most - row)
        yield start, end
        start = end


def _parts(piece: Shard, start: int, stop: int, boxes: list[View]) -> Iterator[WrittenBox]:
    for (offset, shape), begin in piece_boxes(piece, start, stop):
        for view in boxes:
            overlap = intersect(view, offset, shape)
            if overlap is not None:
                within = tuple(
                    slice(first, first + size)
                    for first, size in zip(overlap.slice_offset, overlap.slice_shape, strict=True)
                )
                yield WrittenBox(
                    piece,
                    begin,
                    shape,
                    within,
                    view,
                    overlap.tensor_offset,
                    overlap.tensor_shape,
                )
