"""Buckets and FSDP units: which parameters are communicated together; priced in ``predict``, used by ``parallel``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.facts.model.parameters import EMBEDDING


def buckets(sizes: Iterable[tuple[str, int]], bucket_bytes: int) -> list[list[str]]:
    """Cut parameters, given as (name, bytes) in forward order, into buckets whose gradients are summed at once.

    Gradients appear from the last layer to the first, so buckets are filled in that order: the first one is
    complete, and on its way, while the backward pass is still working on the rest. A bucket closes before it
    would outgrow its limit; a parameter larger than that has one of its own.
    """
    cut: list[list[str]] = []
    filled = 0
    for name, size in reversed(list(sizes)):
        if not cut or filled + size > bucket_bytes:
            cut.append([])
            filled = 0
        cut[-1].append(name)
        filled += size
    return cut


# Optimizer states and gradients sharded (``zero=1|2``): a bucket is one flat tensor, cut into as many equal chunks as
# there are ranks. Where in a bucket a parameter lies then decides which rank updates it.


def buckets_by_kind(parameters: Iterable[tuple[str, int, Hashable]], bucket_bytes: int) -> list[list[str]]:
    """As ``buckets``, of parameters given as (name, bytes, kind): only those of one kind share a bucket.

    Buckets come in the order in which they are complete: when the backward pass has reached their earliest parameter.
    """
    listed = list(parameters)
    place = {name: number for number, (name, _, _) in enumerate(listed)}
    cut = [
        bucket
        for kind in dict.fromkeys(kind for _, _, kind in listed)
        for bucket in buckets([(name, size) for name, size, of in listed if of == kind], bucket_bytes)
    ]
    return sorted(cut, key=lambda bucket: place[bucket[-1]], reverse=True)


def flat_kind(label: str, name: str, copies: int, block: int | None = None) -> Hashable:
    """What decides with whom a parameter may share a bucket: ``name`` is canonical, ``label`` its name on this rank.

    Some gradients are also summed with other ranks than data ranks, rank by rank of this group: those of parameters
    that ``copies`` ranks of a tensor group hold alike, and those of the two copies of a tied embedding. Their chunks
    must be the same ones over there, so they have buckets whose sizes are the same over there. ``block``: of a
    parameter whose elements come in such blocks, which no chunk may cut; others in its bucket have the same.
    """
    if name == EMBEDDING:
        return label
    return copies if block is None else (copies, block)


def chunk_ranges(
    bucket: Iterable[tuple[str, int]], ranks: int, index: int, block: int = 1
) -> Iterator[tuple[str, int, int]]:
    """What lies in chunk ``index`` of a flat bucket, given as (name, elements): names, each with its elements there."""
    listed = list(bucket)
    chunk = even_share(sum(size for _, size in listed), ranks, block)
    start = -index * chunk  # of a parameter, counted from the beginning of the chunk
    for name, size in listed:
        begin, end = max(-start, 0), min(chunk - start, size)
        if begin < end:
            yield name, begin, end
        start += size


def even_share(elements: int, ranks: int, block: int = 1) -> int:
    """What each of several ranks holds of so many elements, or rows: as much as the others, the end padded; of whole
    blocks."""
    return -(-elements // (ranks * block)) * block


def sharded_dimension(shape: Sequence[int], ranks: int) -> int:
    """Which dimension ``zero=3`` shares out: rows; of a stack with too few experts for all ranks, each one's rows."""
    few = len(shape) == 3 and shape[0] % ranks != 0
    return int(few and shape[1] % ranks == 0)


# Parameters sharded as well (``zero=3``): a unit is gathered before it is used, and freed after.


@dataclass(frozen=True)
class Unit:
    """Modules, by their paths, whose parameters are gathered at once and whose gradients are reduced at once."""

    modules: tuple[str, ...]
    whole: bool = False  # from its first use in the forward pass to its last one in the backward pass
    looked_up: bool = False  # the backward pass does not read these parameters

    def gathers(self, elements: int, persist_below: int) -> int:
        """How often a micro-batch gathers it, in a network without a pipeline."""
        return 1 if self.looked_up or self.stays(elements, persist_below) else 2

    def stays(self, elements: int, persist_below: int) -> bool:
        """Whether its ``elements`` parameters stay gathered between the forward and the backward pass."""
        return self.whole or elements < persist_below


def units(layers: range, unit: int, first: bool, last: bool, tied: bool) -> list[Unit]:
    """The units of a stage, in forward order. ``tied``: embedding and head are one matrix, where both are here.

    ``unit`` blocks make one. The final norm, too small to travel alone, goes with the last blocks. These and the head
    are used at the end of the forward pass and at the start of the backward pass, so they stay. A tied embedding is
    used at both ends, so it stays in between: with the norm it is the unit of the stage itself, whose path is empty.
    """
    # A stage keeps the learned positions, where a model has them, next to its token embedding.
    embedding = ("model.embed_tokens", "model.embed_positions")
    paths = [f"model.layers.{layer}" for layer in layers]
    blocks = [Unit(tuple(paths[start : start + unit])) for start in range(0, len(paths), unit)]
    if first and last and tied:
        return [Unit(("",), whole=True), *blocks[:-1], Unit(blocks[-1].modules, whole=True)]
    if last:
        blocks[-1] = Unit((*blocks[-1].modules, "model.norm"), whole=True)
    before = [Unit(embedding, looked_up=True)] if first else []
    after = [Unit(("lm_head",), whole=True)] if last else []
    return [*before, *blocks, *after]
