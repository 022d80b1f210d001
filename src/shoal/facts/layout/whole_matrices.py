"""Which rank assembles each whole matrix for an optimizer that needs one, such as Muon, when ranks hold only parts
of it.

Matrices are dealt out largest first, one per rank and round. In each round every rank sends its parts to the ranks
that assemble the matrices and receives its parts of the updates. All ranks compute this assignment alone, without
exchanging metadata (``facts/layout/updates.py``).
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
    """One parameter, or one expert's matrix in a stack of experts. Vectors are included where the caller selects
    them.
    """

    label: str  # the parameter's name among those of its rank
    name: str  # canonical
    number: int | None  # index in its stack of experts
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class MatrixPart(NamedTuple):
    """The part of a matrix that one rank updates: elements ``start`` to ``stop`` of a box of it, in row-major order."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    first: int  # index of the first of them among all elements of the parameter that this rank updates

    @property
    def size(self) -> int:
        return self.stop - self.start


# Selects parameters by canonical name and number of dimensions.
Chosen = Callable[[str, int], bool]


def matrices_of(sharing: Sharing, rank: int, chosen: Chosen, all_experts: bool = False) -> list[Matrix]:
    """Matrices in the stages of a rank, if any of the ranks that together hold these stages has a part of them.

    ``all_experts``: also those of experts that only other replicas hold.
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
    """Indices in the stack of these experts' matrices."""
    assert model.experts is not None
    each = stack.shape[0] // model.experts.count
    return [each * expert + place for expert in experts for place in range(each)]


def _experts_here(sharing: Sharing, rank: int) -> list[int]:
    """Experts held by the ranks of this replica: all of them, or a subset where ``ep`` spans several replicas."""
    model, layout = sharing.model, sharing.layout
    assert model.experts is not None
    each = model.experts.count // layout.ep
    sets = sorted({member // layout.tp % layout.ep for member in members(sharing, rank)})
    return [expert for one in sets for expert in range(one * each, (one + 1) * each)]


def members(sharing: Sharing, rank: int) -> range:
    """The ranks that together hold all of a rank's stages, one replica of them."""
    ranks = replica_ranks(sharing.layout)
    start = rank - rank // ranks.stride % ranks.size * ranks.stride
    return range(start, start + ranks.size * ranks.stride, ranks.stride)


def rounds(matrices: list[Matrix], ranks: int) -> Iterator[list[Matrix]]:
    """Deal out matrices: per round at most one for each rank, in rank order; the last round may be incomplete."""
    largest_first = sorted(matrices, key=lambda one: -one.size)
    for start in range(0, len(largest_first), ranks):
        yield largest_first[start : start + ranks]


def part_of(one: UpdatedRange, matrix: Matrix) -> MatrixPart | None:
    """The elements of one matrix within a range that a rank updates, or None."""
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
