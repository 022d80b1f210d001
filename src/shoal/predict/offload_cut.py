"""The share of a rank's optimizer states or parameters that is offloaded: cut between tensors, as the engine does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.facts.layout import Layout
from shoal.facts.layout.offload import offloaded, waiting
from shoal.facts.layout.parameter_groups import ADAPTERS, DENSE, EXPERTS
from shoal.facts.layout.ranks import stride
from shoal.facts.layout.updates import reduced_buckets, updated_ranges
from shoal.facts.model import Model
from shoal.facts.model.parameters import block_of
from shoal.predict.optimizer_matrices import sharing_of
from shoal.predict.rank_parameters import (
    ShardDegrees,
    expert_tensors,
    named_factors,
    named_tensors,
    padded_size,
    rank_parameters,
)
from shoal.predict.workload import Workload

EMBEDDINGS = "model.embed_"  # token embedding and learned positions


# With more data ranks, only this many are examined: the more ranks, the smaller the pieces and the differences.
LOOKED_AT = 8


def shards_apart(workload: Workload) -> range:
    """The data ranks whose offloaded shares of their states may differ, because each rank has other pieces."""
    part = waiting(workload.layout.offload, "optimizer")
    if part is None or part.fraction == 1.0 or not _in_chunks(workload) or workload.lora is not None:
        return range(1)
    return range(min(LOOKED_AT, workload.groups[DENSE].sharded.size))


def shard_of(workload: Workload, rank: int) -> int:
    """A rank's index among the data ranks that shard optimizer states."""
    group = workload.groups[DENSE].sharded
    return rank // group.stride % group.size


def share_away(workload: Workload, what: str, stage: int = 0, shard: int = 0) -> float:
    """The offloaded share of optimizer, params or activations on data rank ``shard`` of pipeline rank ``stage``."""
    part = waiting(workload.layout.offload, what)
    if part is None:
        return 0.0
    # Activations are offloaded by whole blocks. LoRA's factors are too small for the exact cut to matter.
    adapters = workload.lora is not None and what == "optimizer"
    if part.fraction == 1.0 or what == "activations" or adapters:
        return part.fraction
    if what == "optimizer":
        pieces = _updated(workload, stage, shard)
        return sum(size for _, size in _away(workload, stage, shard)) / sum(size for _, size in pieces)
    held = _held(workload, stage)
    sizes = [size for _, size in held]
    return sum(sizes[offloaded(sizes, part.fraction) :]) / sum(sizes)


def largest_piece(workload: Workload, stage: int, shard: int) -> int:
    """Elements of the largest piece with offloaded states, among those that a rank updates."""
    if workload.lora is None:
        return max((size for _, size in _away(workload, stage, shard)), default=0)
    # Only adapters are updated. A bucket's chunk may contain all of one.
    ranks = workload.groups[ADAPTERS].sharded.size if not _in_chunks(workload) else 1
    here = rank_parameters(workload.layout, workload.model, workload.cut_by, stage)
    factors = (one for each in here.stages for one in named_factors(workload, each, 0))
    return max((padded_size(one, ranks) // ranks for one in factors), default=0)


def largest_block(workload: Workload, stage: int, shard: int) -> int:
    """Offloaded elements of the transformer block that has the most, among those that a rank updates."""
    blocks: Counter[int] = Counter()
    for label, size in _away(workload, stage, shard):
        if (block := block_of(label)) is not None:
            blocks[block] += size
    return max(blocks.values(), default=0)


class LeavingBucket(NamedTuple):
    """A bucket of gradients that data ranks reduce together."""

    elements: int
    leaving: int  # of this rank's share, those that leave for the host


def leaving_buckets(workload: Workload, shard: int) -> list[LeavingBucket]:
    """A data rank's buckets without a pipeline, in the order in which they complete."""
    away = {label for label, _ in _away(workload, 0, shard)}
    buckets = reduced_buckets(sharing_of(workload), shard * workload.groups[DENSE].sharded.stride)
    return [
        LeavingBucket(
            sum(size for _, size in one.sizes),
            sum(stop - start for label, start, stop in one.own if label in away),
        )
        for one in buckets
    ]


def _away(workload: Workload, stage: int, shard: int) -> list[tuple[str, int]]:
    """The pieces that the host updates: the last ones for a fraction, and all with offloaded parameters."""
    part, resting = (waiting(workload.layout.offload, what) for what in ("optimizer", "params"))
    assert part is not None
    pieces, home = _updated(workload, stage, shard), frozenset[str]()
    first = offloaded([size for _, size in pieces], part.fraction)
    if resting is not None and _in_chunks(workload):
        held = _held(workload, stage)
        home = frozenset(
            label for label, _ in held[offloaded([size for _, size in held], resting.fraction) :]
        )
    return [piece for number, piece in enumerate(pieces) if number >= first or piece[0] in home]


def _in_chunks(workload: Workload) -> bool:
    """Whether data ranks update chunks of flat buckets, which cut parameters anywhere."""
    dense = workload.groups[DENSE]
    return dense.sharded.size > 1 and not dense.fully_sharded


def _updated(workload: Workload, stage: int, shard: int) -> Sequence[tuple[str, int]]:
    """The pieces that a rank updates, in forward order."""
    if _in_chunks(workload) and workload.lora is None:
        rank = stage * stride("pp", workload.layout) + shard * workload.groups[DENSE].sharded.stride
        ranges = updated_ranges(sharing_of(workload), rank)
        place = {label: number for number, (label, _) in enumerate(_held(workload, stage))}
        pieces = ((one.label, one.stop - one.start) for one in ranges)
        return sorted(pieces, key=lambda piece: place[piece[0]])
    return _held(workload, stage, updated=True)


def _held(workload: Workload, stage: int, updated: bool = False) -> Sequence[tuple[str, int]]:
    """The parameters that a rank holds, in forward order; ``updated``: only its share of those it updates."""
    layout, groups = workload.layout, workload.groups
    dense, routed = groups[DENSE], groups.get(EXPERTS, groups[DENSE])
    shards = dense.sharded.size, routed.sharded.size
    if not updated and not dense.fully_sharded:
        shards = 1, 1
    return _sizes(workload.model, ShardDegrees(layout.tp, layout.ep, *shards), layout, workload.cut_by, stage)


@lru_cache(maxsize=4096)
def _sizes(
    model: Model, degrees: ShardDegrees, layout: Layout, seq: int | None, stage: int
) -> tuple[tuple[str, int], ...]:
    here = rank_parameters(layout, model, seq, stage)
    sizes = []
    for one in here.stages:
        whole = [(tensor, degrees.ranks) for tensor in named_tensors(here, model, one)]
        whole += [
            (tensor, degrees.expert_ranks) for tensor in expert_tensors(model, degrees.tp, degrees.ep, one)
        ]
        # Routed experts follow the other parameters of their block.
        whole.sort(key=lambda pair: _layer(pair[0].label, model.layers))
        sizes += [(tensor.label, padded_size(tensor, ranks) // ranks) for tensor, ranks in whole]
    return tuple(sizes)


def _layer(name: str, layers: int) -> int:
    """The index of a tensor's block; the ends of the network sort before and after all blocks."""
    if (block := block_of(name)) is not None:
        return block
    return -1 if name.startswith(EMBEDDINGS) else layers
