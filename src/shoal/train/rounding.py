"""Stochastic rounding to bf16: up or down at random, so that the expected value is exact (``recipe.rounding``).

A weight's update is often smaller than half of bf16's spacing, 2^-8 of the weight: rounded to nearest, it would be lost
every time. The random bits are a hash of (seed, step number, parameter name, index in the whole parameter), so they are
the same however a layout cuts the parameter, and a resume needs no stored state. One hash has 64 bits: 16 for the
weight and 16 for each of AdamW's moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.facts.model.tensor_split import Box
from shoal.facts.optimizers import ROUNDED_ELEMENTS
from shoal.models.random import bits, key
from shoal.parallel.shards import Shard

# Which 16 bits of a hash belong to which value.
WEIGHT, MEAN, SQUARE = range(3)
# A bf16 value is the upper half of an fp32 one.
HALF = 16
UPPER = -(2**HALF)


class Place(NamedTuple):
    """Where a box's elements are in the whole parameter, in three dimensions: element i of the box is at (i / run, i
    % run / row, i % run % row).
    """

    run: int
    row: int
    run_stride: int
    row_stride: int
    first: int  # index in the whole parameter of the box's first element
    one_matrix: bool  # a single matrix, not a stack

    @classmethod
    def of(cls, box: Box) -> Place:
        missing = 3 - len(box.whole)
        assert missing >= 0, box
        whole, shape = ((1,) * missing + tuple(sizes) for sizes in (box.whole, box.shape))
        offset = (0,) * missing + tuple(box.offset)
        row_stride = whole[2]
        run_stride = whole[1] * row_stride
        first = offset[0] * run_stride + offset[1] * row_stride + offset[2]
        return cls(shape[1] * shape[2], shape[2], run_stride, row_stride, first, shape[0] <= 1)

    @property
    def contiguous(self) -> bool:
        """Whether consecutive elements of the box are consecutive in the whole."""
        return self.row == self.row_stride and (self.run == self.run_stride or self.one_matrix)


@dataclass(frozen=True)
class Noise:
    """The random bits of a piece's elements in one update."""

    key: int
    place: Place
    start: int  # the first element, as an index in the box

    def after(self, elements: int) -> Noise:
        return replace(self, start=self.start + elements)

    def drawn(self, count: int, device: torch.device) -> Tensor:
        """64 bits for each of the first ``count`` elements."""
        return bits(self.key, self._index(count, device))

    def _index(self, count: int, device: torch.device) -> Tensor:
        """Indices of elements in the whole parameter."""
        place = self.place
        index = torch.arange(self.start, self.start + count, device=device)
        if not place.contiguous:
            within = index % place.run
            index = index.sub_(within).floor_divide_(place.run).mul_(place.run_stride)
            column = within % place.row
            within.sub_(column).floor_divide_(place.row).mul_(place.row_stride)
            index = index.add_(within).add_(column)
        return index.add_(place.first)


class StochasticRounding:
    """The random bits for all pieces of a rank; ``step`` numbers the update."""

    def __init__(self, pieces: list[Shard], seed: int) -> None:
        self.seed, self.step = seed, 0
        self._pieces: dict[Tensor, Shard] = {piece.tensor: piece for piece in pieces}

    def noise(self, weight: Tensor) -> Noise:
        piece = self._pieces[weight]
        return Noise(key(self.seed, self.step, f"rounding {piece.name}"), Place.of(piece.box), piece.start)


def parts(size: int, most: int = ROUNDED_ELEMENTS) -> Iterator[slice]:
    """Slices of so few elements that temporaries take almost no memory."""
    for start in range(0, size, most):
        yield slice(start, min(start + most, size))


def round_(wide: Tensor, drawn: Tensor, whose: int) -> Tensor:
    """Round fp32 values in place to one of the two nearest bf16 values; exact bf16 values stay."""
    chance = (drawn >> (HALF * whose)).bitwise_and_(2**HALF - 1)
    # A float's lower bits are its magnitude: a carry makes it larger, up to infinity, whatever the sign.
    wide.view(torch.int32).add_(chance).bitwise_and_(UPPER)
    return wide


def settle_rounded(old: Tensor, new: Tensor, drawn: Tensor, whose: int, refused: Tensor) -> None:
    """Set bf16 values to ``new``, unless the update is refused. ``new`` (fp32) is overwritten."""
    old.copy_(torch.where(refused, old, round_(new, drawn, whose)))


def settle_weight(old: Tensor, new: Tensor, noise: Noise, refused: Tensor) -> None:
    """The same for a weight's elements, a few at a time."""
    for part in parts(old.numel()):
        drawn = noise.after(part.start).drawn(part.stop - part.start, old.device)
        settle_rounded(old[part], new[part], drawn, WEIGHT, refused)
        del drawn  # before the next allocation
