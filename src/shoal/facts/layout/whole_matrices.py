"""Matrices of which several ranks update parts, and on which of these ranks each is put together.

An optimizer that works on whole matrices (Muon) has them dealt out, one a rank and round, the largest first: in a round
every rank sends its parts to those who put them together, and has its parts of the results back from them. Neither
side asks the other what it has (``facts/layout/updates.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.facts.layout.parameter_groups import replica_ranks
from shoal.facts.layout.ranks import coordinates
from shoal.facts.layout.stages import cut, stages_of_rank
from shoal.facts.layout.updates import Sharing, UpdatedRange, stage_parameters, updated_ranges
from shoal.facts.model import Model
from shoal.facts.model.parameters import Parameter


class Matrix(NamedTuple):
    """One parameter, or one matrix of a stack of experts'. A vector is one too, where it is asked for."""

    label: str  # of the parameter, among those of its rank
    name: str  # canonical
    number: int | None  # in its stack
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class MatrixPart(NamedTuple):
    """What a rank updates of a matrix: elements ``start`` to ``stop`` of a box of it, row by row."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    first: int  # the number of the first of them among all that the rank updates of the parameter

    @property
    def size(self) -> int:
        return self.stop - self.start


# Whether a parameter, by its canonical name and its number of dimensions, is meant.
Chosen = Callable[[str, int], bool]


def matrices_of(sharing: Sharing, rank: int, chosen: Chosen, all_experts: bool = False) -> list[Matrix]:
    """Those of the stages of a rank, as far as the ranks that hold these stages together have any of them.

    ``all_experts``: also of experts that are in other copies of a model alone.
    """
    model, layout = sharing.model, sharing.layout
    stages = cut(model, layout.pp * layout.chunks, sharing.seq)
    place = coordinates(rank, layout)["pp"]
    here = stages_of_rank(layout.pp, layout.chunks, layout.schedule, place)
    routed: Sequence[int] = range(0)
    if model.experts is not None:
        routed = range(model.experts.count) if all_experts else _experts_here(sharing, rank)
    return [
        matrix
        for number in here
        for label, one in stage_parameters(model, stages[number], layout.pp)
        if chosen(one.name, len(one.shape))
        for matrix in (
            [Matrix(label, one.name, None, one.shape)]
            if len(one.shape) < 3
            else [
                Matrix(label, one.name, number, one.shape[1:]) for number in _of_experts(model, one, routed)
            ]
        )
    ]


def _of_experts(model: Model, stack: Parameter, experts: Sequence[int]) -> list[int]:
    """The numbers of these experts' matrices in a stack."""
    assert model.experts is not None
    each = stack.shape[0] // model.experts.count
    return [each * expert + place for expert in experts for place in range(each)]


def _experts_here(sharing: Sharing, rank: int) -> list[int]:
    """The experts that some rank beside this one holds: all of them, or with many copies of a model some."""
    model, layout = sharing.model, sharing.layout
    assert model.experts is not None
    each = model.experts.count // layout.ep
    sets = sorted({member // layout.tp % layout.ep for member in members(sharing, rank)})
    return [expert for one in sets for expert in range(one * each, (one + 1) * each)]


def members(sharing: Sharing, rank: int) -> range:
    """The ranks that together hold all of a rank's stages."""
    ranks = replica_ranks(sharing.layout)
    start = rank - rank // ranks.stride % ranks.size * ranks.stride
    return range(start, start + ranks.size * ranks.stride, ranks.stride)


def rounds(matrices: list[Matrix], ranks: int) -> Iterator[list[Matrix]]:
    """In each, one matrix for each rank, in the order of ranks; the last round may have fewer."""
    largest_first = sorted(matrices, key=lambda one: -one.size)
    for start in range(0, len(largest_first), ranks):
        yield largest_first[start : start + ranks]


def part_of(one: UpdatedRange, matrix: Matrix) -> MatrixPart | None:
    """What a rank updates of one of its parameter's matrices."""
    box, first = one.box, 0
    offset, shape = box.offset, box.shape
    if matrix.number is not None:
        number = matrix.number - offset[0]
        if not 0 <= number < shape[0]:
            return None
        offset, shape = offset[1:], shape[1:]
        first = number * math.prod(shape)
    start, stop = max(one.start, first), min(one.stop, first + math.prod(shape))
    if start >= stop:
        return None
    return MatrixPart(offset, shape, start - first, stop - first, start - one.start)


@lru_cache(maxsize=4096)
def ranges_by_label(sharing: Sharing, rank: int) -> dict[str, UpdatedRange]:
    return {one.label: one for one in updated_ranges(sharing, rank)}
