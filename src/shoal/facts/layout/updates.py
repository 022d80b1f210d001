"""Optimizer-state ownership: which elements of which parameters each rank updates, computed by every rank without
communication.

``parallel`` shards parameters accordingly; an optimizer that needs whole matrices finds the other parts' owners
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from shoal.facts.blockwise import block_length
from shoal.facts.layout import Layout
from shoal.facts.layout.buckets import buckets_by_kind, chunk_ranges, even_share, flat_kind, sharded_dimension
from shoal.facts.layout.parameter_groups import (
    ParameterGroup,
    expert_ranks,
    group_name,
    parameter_groups,
)
from shoal.facts.layout.ranks import coordinates
from shoal.facts.layout.stages import Stage, cut, stages_of_rank
from shoal.facts.model import Model
from shoal.facts.model.parameters import EMBEDDING, HEAD, Parameter, by_name, llama_parameters
from shoal.facts.model.tensor_split import Box, TensorPart, tensor_part


@dataclass(frozen=True)
class Sharing:
    """Everything that determines which rank updates what."""

    model: Model
    layout: Layout
    seq: int | None  # sequence length, which decides where stages are cut
    width: int  # bytes of a gradient element, which decides how buckets fill
    bucket_bytes: int
    frozen: frozenset[str] = frozenset()  # names of parameters that are not trained
    blockwise: bool = (
        False  # moments are quantized in blocks (``facts/blockwise.py``), which no bucket chunk may cut
    )


class UpdatedRange(NamedTuple):
    """Elements ``start`` to ``stop`` of a rank's box of a parameter, in row-major order."""

    name: str  # canonical
    label: str  # its name on this rank
    part: TensorPart
    start: int
    stop: int

    @property
    def box(self) -> Box:
        return self.part.box


@lru_cache(maxsize=1024)
def updated_ranges(sharing: Sharing, rank: int) -> tuple[UpdatedRange, ...]:
    """The elements a rank updates, stage by stage and group by group."""
    layout = sharing.layout
    place, ep = coordinates(rank, layout), expert_ranks(layout)
    parts = _parts(sharing, place["pp"], place["tp"], rank // ep.stride % ep.size)
    return tuple(
        one
        for group, of_stages in parts
        for tensors, buckets in of_stages
        for one in _ranges(tensors, buckets, group, rank // group.sharded.stride % group.sharded.size)
    )


class ReducedBucket(NamedTuple):
    """Gradients that are reduced together, in one flat bucket."""

    sizes: list[tuple[str, int]]  # elements by label, the last layer's first
    own: list[tuple[str, int, int]]  # in this rank's chunk: label, start, stop


def reduced_buckets(sharing: Sharing, rank: int) -> list[ReducedBucket]:
    """All flat buckets of a rank without a pipeline, in the order in which they complete."""
    place, ep = coordinates(rank, sharing.layout), expert_ranks(sharing.layout)
    parts = _parts(sharing, place["pp"], place["tp"], rank // ep.stride % ep.size)
    order = {one.name: number for number, one in enumerate(_listed(sharing.model))}
    found = [
        ReducedBucket(
            bucket.sizes,
            list(
                chunk_ranges(
                    bucket.sizes,
                    group.sharded.size,
                    rank // group.sharded.stride % group.sharded.size,
                    bucket.block,
                )
            ),
        )
        for group, of_stages in parts
        for _, buckets in of_stages
        for bucket in buckets
    ]
    return sorted(found, key=lambda one: order[one.sizes[-1][0]], reverse=True)


class _Held(NamedTuple):
    name: str
    label: str
    part: TensorPart

    @property
    def block(self) -> int | None:
        return block_length(self.part.box.whole)


class _Bucket(NamedTuple):
    sizes: list[tuple[str, int]]  # element counts by label
    block: int  # elements that must stay together


@lru_cache(maxsize=1024)
def _parts(
    sharing: Sharing, pipeline: int, tensor: int, expert: int
) -> list[tuple[ParameterGroup, list[tuple[list[_Held], list[_Bucket]]]]]:
    """Per group and stage held here: the parameters, and the buckets they share, if they are bucketed."""
    model, layout = sharing.model, sharing.layout
    groups = parameter_groups(layout, model.experts is not None, lora=False)
    stages = cut(model, layout.pp * layout.chunks, sharing.seq)
    mine = [stages[number] for number in stages_of_rank(layout.pp, layout.chunks, layout.schedule, pipeline)]
    found = []
    for name, group in groups.items():
        of_stages = []
        for stage in mine:
            tensors = [
                _Held(one.name, label, tensor_part(one, layout.tp, tensor, layout.ep, expert))
                for label, one in stage_parameters(model, stage, layout.pp)
                if group_name(one) == name and one.name not in sharing.frozen
            ]
            of_stages.append((tensors, _buckets(tensors, group, sharing)))
        found.append((group, of_stages))
    return found


def stage_parameters(model: Model, stage: Stage, pp: int) -> Iterator[tuple[str, Parameter]]:
    """A stage's parameters in forward order, with labels. A tied head is a copy where a pipeline has two ends."""
    for one in _listed(model):
        at_start = one.kind in ("embedding", "position")
        if one.layer in stage.layers if one.layer is not None else stage.first if at_start else stage.last:
            yield one.name, one
    if model.tied and pp > 1 and stage.last:
        yield HEAD, by_name(model)[EMBEDDING]


@lru_cache(maxsize=64)
def _listed(model: Model) -> tuple[Parameter, ...]:
    return tuple(llama_parameters(model))


def _buckets(tensors: Sequence[_Held], group: ParameterGroup, sharing: Sharing) -> list[_Bucket]:
    if group.sharded.size == 1 or group.zero == 3:
        return []
    sizes = {one.label: one.part.box.size for one in tensors}
    blocks = {one.label: one.block if sharing.blockwise else None for one in tensors}
    listed = [
        (
            one.label,
            sizes[one.label] * sharing.width,
            flat_kind(one.label, one.name, one.part.copies, blocks[one.label]),
        )
        for one in tensors
    ]
    return [
        _Bucket([(label, sizes[label]) for label in labels], blocks[labels[0]] or 1)
        for labels in buckets_by_kind(listed, sharing.bucket_bytes)
    ]


def _ranges(
    tensors: Sequence[_Held], buckets: Sequence[_Bucket], group: ParameterGroup, index: int
) -> Iterator[UpdatedRange]:
    ranks = group.sharded.size
    if buckets:
        of = {one.label: one for one in tensors}
        for bucket in buckets:
            for label, start, stop in chunk_ranges(bucket.sizes, ranks, index, bucket.block):
                yield UpdatedRange(*of[label], start, stop)
        return
    for one in tensors:
        box = one.part.box
        if ranks == 1:
            yield UpdatedRange(*one, 0, box.size)
        elif sharded_dimension(box.shape, ranks):
            part = replace(one.part, box=rows_of_each(box, ranks, index))
            yield UpdatedRange(one.name, one.label, part, 0, part.box.size)
        else:
            rest, share = math.prod(box.shape[1:]), even_share(box.shape[0], ranks)
            first = min(index * share, box.shape[0])
            stop = min(first + share, box.shape[0])
            if first < stop:
                yield UpdatedRange(*one, first * rest, stop * rest)


def rows_of_each(box: Box, ranks: int, index: int) -> Box:
    """The same rows of every expert: a box of the stack."""
    experts, rows, width = box.shape
    first, *corner = box.offset
    share = rows // ranks
    return Box(box.whole, (first, corner[0] + index * share, corner[1]), (experts, share, width))
