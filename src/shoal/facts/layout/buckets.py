"""Buckets and FSDP units: which parameters are communicated together; priced in ``predict``, used by ``parallel``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.facts.model.parameters import EMBEDDING


def buckets(sizes: Iterable[tuple[str, int]], bucket_bytes: int) -> list[list[str]]:
    """Group parameters, given as (name, bytes) in forward order, into buckets whose gradients are reduced together.

    Gradients appear from the last layer to the first, so buckets fill in that order: the first is reduced while the
    backward pass is still computing the rest. A bucket closes before it would exceed its limit; a parameter larger
    than the limit gets a bucket of its own.
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


# Sharded optimizer states and gradients (``zero=1|2``): a bucket is one flat tensor, split into equal chunks, one
# per rank. A parameter's position in the bucket decides which rank updates it.


def buckets_by_kind(parameters: Iterable[tuple[str, int, Hashable]], bucket_bytes: int) -> list[list[str]]:
    """Like ``buckets``, for parameters given as (name, bytes, kind): only parameters of one kind share a bucket.

    Buckets are returned in the order in which they complete: when the backward pass reaches their earliest
    parameter.
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
    """The kind that decides which parameters may share a bucket. ``name`` is canonical, ``label`` its name on this
    rank.

    Some gradients are also summed over ranks other than data ranks: parameters that ``copies`` tensor ranks
    replicate, and the two copies of a tied embedding. Their chunks must match across those ranks, so they are
    bucketed by themselves, with the same sizes on each. ``block``: the quantization block length of a parameter,
    which no chunk may cut; a bucket holds parameters of one block length.
    """
    if name == EMBEDDING:
        return label
    return copies if block is None else (copies, block)


def chunk_ranges(
    bucket: Iterable[tuple[str, int]], ranks: int, index: int, block: int = 1
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, stop) for what lies in chunk ``index`` of a flat bucket, which is given as (name,
    elements).
    """
    listed = list(bucket)
    chunk = even_share(sum(size for _, size in listed), ranks, block)
    start = -index * chunk  # of a parameter, relative to the start of the chunk
    for name, size in listed:
        begin, end = max(-start, 0), min(chunk - start, size)
        if begin < end:
            yield name, begin, end
        start += size


def even_share(elements: int, ranks: int, block: int = 1) -> int:
    """Elements (or rows) per rank when ``elements`` are shared equally, padded at the end, in whole blocks."""
    return -(-elements // (ranks * block)) * block


def sharded_dimension(shape: Sequence[int], ranks: int) -> int:
    """The dimension that ``zero=3`` shards: rows; for a stack with fewer experts than ranks, the rows of each
    expert.
    """
    few = len(shape) == 3 and shape[0] % ranks != 0
    return int(few and shape[1] % ranks == 0)


# Sharded parameters (``zero=3``): a unit is all-gathered before use and freed afterwards.


@dataclass(frozen=True)
class Unit:
    """Modules, by path, whose parameters are all-gathered together and whose gradients are reduce-scattered
    together.
    """

    modules: tuple[str, ...]
    whole: bool = False  # stays gathered from its first use in the forward pass to its last, backward
    looked_up: bool = False  # an embedding: the backward pass does not read these parameters

    def gathers(self, elements: int, persist_below: int) -> int:
        """All-gathers per micro-batch, without a pipeline."""
        return 1 if self.looked_up or self.stays(elements, persist_below) else 2

    def stays(self, elements: int, persist_below: int) -> bool:
        """Whether its ``elements`` parameters stay gathered between the forward and the backward pass."""
        return self.whole or elements < persist_below


def units(layers: range, unit: int, first: bool, last: bool, tied: bool) -> list[Unit]:
    """The FSDP units of a stage, in forward order. ``tied``: embedding and head are one matrix, where both are
    here.

    Every ``unit`` blocks form one. The final norm, too small for a collective of its own, joins the last blocks.
    That unit and the head end the forward pass and start the backward pass, so they stay gathered. A tied embedding
    is used at both ends and stays gathered throughout: with the norm it forms the root unit of the stage, whose
    path is empty.
    """
    # Learned positions, where a model has them, live on the stage of the token embedding.
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
