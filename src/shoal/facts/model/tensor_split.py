"""Which slice of a parameter a tensor rank holds, and over which ranks its gradient is summed.

Decided once here: ``parallel`` executes it, ``predict`` prices it, checkpoints and ``parity`` reassemble parameters by
it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from shoal.facts.model.parameters import Parameter

# Over no ranks; over ranks with the same key/value head; over the whole tensor group.
SummedOver = Literal["copies", "tensor"] | None


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a parameter."""

    whole: tuple[int, ...]  # the whole parameter's shape
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return box_slices(self.offset, self.shape)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One tensor rank's part of a parameter."""

    box: Box
    copies: int = 1  # ranks of the group with this same box
    copy: int = 0  # index of this rank among them


def tensor_part(parameter: Parameter, tp: int, index: int, ep: int = 1, ep_index: int = 0) -> TensorPart:
    """The part of a canonical parameter on rank ``index`` of ``tp``; for stacked experts, those of ``ep_index``."""
    shape, heads = parameter.shape, parameter.heads
    if parameter.kind == "expert" and len(shape) == 3:
        count, *rest = shape
        first, matrix = (
            ep_index * (count // ep),
            tensor_part(replace(parameter, shape=tuple(rest)), tp, index),
        )
        box = Box(shape, (first, *matrix.box.offset), (count // ep, *matrix.box.shape))
        return replace(matrix, box=box)
    if parameter.split == "none":
        return TensorPart(Box(shape, (0,) * len(shape), shape), tp, index)
    if heads is not None and tp > heads:
        # With fewer heads than ranks, neighbours share one: the head that their query heads attend to.
        copies = tp // heads
        return TensorPart(cut_evenly(shape, 0, heads, index // copies), copies, index % copies)
    return TensorPart(cut_evenly(shape, 1 if parameter.split == "row" else 0, tp, index))


def summed_over(parameter: Parameter, tp: int, sp: bool) -> SummedOver:
    """The tensor ranks whose gradients must be summed, besides those of data ranks."""
    if tp == 1:
        return None
    if parameter.split == "none":
        # Norms, biases after a row split, learned positions: with sequence parallelism a rank sees some of the tokens;
        # without it, all of them, like every other rank.
        return "tensor" if sp or parameter.partial else None
    # The same head, with different queries on each rank.
    return "copies" if parameter.heads is not None and tp > parameter.heads else None


def cut_evenly(shape: tuple[int, ...], dimension: int, parts: int, index: int) -> Box:
    """Equal parts, rounded up: the last ones are smaller, or empty, if the size does not divide (vocabularies)."""
    most = -(-shape[dimension] // parts)
    start = min(index * most, shape[dimension])
    size = min(most, shape[dimension] - start)
    offset = tuple(start if axis == dimension else 0 for axis in range(len(shape)))
    return Box(shape, offset, tuple(size if axis == dimension else full for axis, full in enumerate(shape)))


def box_slices(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """A box as an array index."""
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def range_boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements ``start`` to ``stop`` of an array in row-major order, as (offset, shape) of boxes in order.

    A range that does not begin or end with a row yields a box for the rest of one row, one for whole rows, and one for
    the beginning of another; likewise within those rows.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    width = math.prod(shape[1:])
    first, last = -(-start // width), stop // width  # whole rows
    if first > last:  # within a single row
        yield from _in_row(shape, last, start - last * width, stop - last * width)
        return
    if start < first * width:
        yield from _in_row(shape, first - 1, start - (first - 1) * width, width)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * width < stop:
        yield from _in_row(shape, last, 0, stop - last * width)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in range_boxes(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def meet(
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    other_offset: tuple[int, ...],
    other_shape: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The intersection of two boxes, as (offset, shape), or None."""
    starts = tuple(map(max, offset, other_offset))
    ends = (min(a + b, c + d) for a, b, c, d in zip(offset, shape, other_offset, other_shape, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(size <= 0 for size in sizes) else (starts, sizes)


def tile(shape: tuple[int, ...], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes, as (offset, size), cover every element of a shape exactly once."""
    return cover_alike([((0,) * len(shape), shape)], boxes)


def cover_alike(
    ones: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
    others: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
) -> bool:
    """Whether two sets of boxes cover the same elements equally often.

    Each box is represented by its corners with signs: plus for an even number of far ends, minus for an odd one. Two
    sets are equal exactly if their signed corners are, so boxes need not be compared pairwise.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for way, boxes in ((-1, ones), (1, others)):
        for offset, size in boxes:
            for corner, sign in _corners(offset, size):
                corners[corner] += way * sign
    return not any(corners.values())


def _corners(offset: tuple[int, ...], size: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    ends = (((start, 1), (start + length, -1)) for start, length in zip(offset, size, strict=True))
    for corner in product(*ends):
        yield tuple(place for place, _ in corner), math.prod(sign for _, sign in corner)
