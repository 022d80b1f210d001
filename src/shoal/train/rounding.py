"""Stochastic rounding to bf16: up or down by chance, so that on average nothing is lost (``recipe.rounding``).

A weight's update is often smaller than half of bf16's spacing, 2^-8 of the weight: rounded to nearest, it would be lost
every time. The chance is a hash of (seed, number of the step, name of the parameter, index in the whole parameter). So
the same bits are drawn however a layout cuts the parameter, and a resume needs nothing stored. One hash has 64 bits:
16 for the weight and 16 for each of AdamW's moments.
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

# Which 16 bits of a hash are whose.
WEIGHT, MEAN, SQUARE = range(3)
# A narrow value is the upper half of a wide one.
HALF = 16
UPPER = -(2**HALF)


class Place(NamedTuple):
    """Where elements of a box are in the whole parameter, by three dimensions: element i of the box is at (i / run,
    i % run / row, i % run % row)."""

    run: int
    row: int
    run_stride: int
    row_stride: int
    first: int  # index in the whole of the box's first element
    one_matrix: bool  # no stack of several

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
        """Whether elements that follow each other in the box do so in the whole."""
        return self.row == self.row_stride and (self.run == self.run_stride or self.one_matrix)


@dataclass(frozen=True)
class Noise:
    """The chances of a piece's elements in one update."""

    key: int
    place: Place
    start: int  # the first element, as a number in the box

    def after(self, elements: int) -> Noise:
        return replace(self, start=self.start + elements)

    def drawn(self, count: int, device: torch.device) -> Tensor:
        """64 bits for each of the first so many elements."""
        return bits(self.key, self._index(count, device))

    def _index(self, count: int, device: torch.device) -> Tensor:
        """Of elements in the whole parameter."""
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
    """The chances of all pieces of a rank; ``step`` numbers the update."""

    def __init__(self, pieces: list[Shard], seed: int) -> None:
        self.seed, self.step = seed, 0
        self._pieces: dict[Tensor, Shard] = {piece.tensor: piece for piece in pieces}

    def noise(self, weight: Tensor) -> Noise:
        piece = self._pieces[weight]
        return Noise(key(self.seed, self.step, f"rounding {piece.name}"), Place.of(piece.box), piece.start)


def parts(size: int, most: int = ROUNDED_ELEMENTS) -> Iterator[slice]:
    """So few elements at a time that what is computed on the way is next to nothing."""
    for start in range(0, size, most):
        yield slice(start, min(start + most, size))


def round_(wide: Tensor, drawn: Tensor, whose: int) -> Tensor:
    """fp32 values become, in place, one of the two bf16 values around them; those that are bf16 already stay."""
    chance = (drawn >> (HALF * whose)).bitwise_and_(2**HALF - 1)
    # The magnitude is the lower bits of a float: a carry makes it larger, up to infinity, whatever the sign.
    wide.view(torch.int32).add_(chance).bitwise_and_(UPPER)
    return wide


def settle_rounded(old: Tensor, new: Tensor, drawn: Tensor, whose: int, refused: Tensor) -> None:
    """Let bf16 values become ``new``, fp32 values that are used up by it, unless the update is refused."""
    old.copy_(torch.where(refused, old, round_(new, drawn, whose)))


def settle_weight(old: Tensor, new: Tensor, noise: Noise, refused: Tensor) -> None:
    """The same of a weight's elements, a few at a time."""
    for part in parts(old.numel()):
        drawn = noise.after(part.start).drawn(part.stop - part.start, old.device)
        settle_rounded(old[part], new[part], drawn, WEIGHT, refused)
        del drawn  # before the next
