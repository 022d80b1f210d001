"""Traffic of sharding within a replica (``fsdp``, ``zero=1|2|3``); context ranks shard too.

N ranks shard one replica, and there are M = ``dp`` replicas. A is the number of micro-batches per data rank; in a
pipeline everything below happens once per step, as if A were 1. Element counts include padding.

    zero=1|2  reduce-scatter  per bucket, once per step (zero=2: per micro-batch)   elements · reduce width
              all-gather      per bucket, after the update                          elements · weight width
    zero=3    all-gather      per unit and micro-batch: forward, and again          elements · compute width
                              backward unless it stays gathered or is only
                              looked up (fp8: projections 1 byte)
              reduce-scatter  per unit and micro-batch                              elements · reduce width
    M > 1     all-reduce      per bucket or unit over the replicas, once per step   elements / N · reduce width
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.facts.layout.buckets import Unit, chunk_ranges, even_share, units
from shoal.facts.layout.parameter_groups import DENSE, ParameterGroup
from shoal.facts.layout.stages import Stage
from shoal.facts.precision import compute_width, gradient_width, reduce_width, weight_width
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.rank_parameters import (
    BucketKinds,
    RankParameters,
    RankTensor,
    adapter_key,
    bucket_names,
    in_four_bits,
    is_projection,
    narrow_elements,
    padded,
    padded_factors,
    padded_size,
    trained,
    with_gradients,
)
from shoal.predict.traffic.replicate import bucket_bytes, even_buckets
from shoal.predict.workload import Workload


class EqualPayloads(NamedTuple):
    """Equal buckets or units."""

    elements: int  # in one of them, padding included
    trained: int  # of these, elements with gradients
    times: int  # number of such buckets or units
    gathers: int = 0  # all-gathers of a unit per micro-batch
    projections: int = 0  # of a unit's elements, those that may be gathered in a narrower precision


def calls(workload: Workload, here: RankParameters) -> tuple[CollectiveCall, ...]:
    """Cheap approximation: exact total bytes, in about the right number of buckets, or in units of equal size."""
    group = workload.groups[DENSE]
    shards = group.sharded.size
    if shards == 1:
        return ()
    if group.zero == 3:
        return tuple(unit_calls(workload, _even_units(workload, here, shards), group))
    elements, count = even_buckets(workload, here, _kinds(workload))
    each = even_share(elements, shards * count) * shards
    return tuple(bucket_calls(workload, [EqualPayloads(each, each, count)], group))


def bucket_calls(
    workload: Workload, travelling: Iterable[EqualPayloads], group: ParameterGroup
) -> list[CollectiveCall]:
    """Collectives of buckets: zero=1|2."""
    recipe, sharded, copies = workload.recipe, group.sharded, group.replicated
    passes = workload.accumulation if group.zero == 2 and workload.layout.pp == 1 else 1
    found = []
    for elements, _, count, *_ in travelling:
        reduced = elements * reduce_width(recipe)
        found.append(CollectiveCall("reduce_scatter", sharded.name, reduced, count * passes, "gradients"))
        if copies.size > 1:
            found.append(
                CollectiveCall("all_reduce", copies.name, reduced // sharded.size, count, "gradients")
            )
        found.append(
            CollectiveCall("all_gather", sharded.name, elements * weight_width(recipe), count, "update")
        )
    return found


def unit_calls(
    workload: Workload, travelling: Iterable[EqualPayloads], group: ParameterGroup
) -> list[CollectiveCall]:
    """Collectives of units: zero=3."""
    recipe, sharded, copies = workload.recipe, group.sharded, group.replicated
    passes = workload.accumulation if workload.layout.pp == 1 else 1
    found = []
    compute = compute_width(recipe)
    for elements, gradients, count, gathers, narrow in travelling:
        gathered = round(elements * compute - narrow * (compute - workload.gathered_width))
        reduced = gradients * reduce_width(recipe)
        found.append(CollectiveCall("all_gather", sharded.name, gathered, count * passes, "gather forward"))
        if gathers == 2 and workload.layout.pp == 1:
            found.append(
                CollectiveCall("all_gather", sharded.name, gathered, count * passes, "gather backward")
            )
        if gradients:
            found.append(CollectiveCall("reduce_scatter", sharded.name, reduced, count * passes, "gradients"))
        if gradients and copies.size > 1:
            found.append(
                CollectiveCall("all_reduce", copies.name, reduced // sharded.size, count, "gradients")
            )
    return found


def _even_units(workload: Workload, here: RankParameters, ranks: int) -> list[EqualPayloads]:
    """The FSDP units (``facts/layout/buckets.py``) as if all blocks were alike."""
    size, lora = workload.layout.unit, workload.lora
    count = sum(even_share(len(stage.layers), size) for stage in here.stages)
    embedding, norm, head = (padded(one, ranks) for one in (here.embedding, here.norm, here.head))
    blocks = here.dense * padded(here.dense_block, ranks) + here.sparse * padded(here.sparse_block, ranks)
    key = adapter_key(lora, workload.model)
    narrow = here.dense * narrow_elements(here.dense_block, ranks, key)
    narrow += here.sparse * narrow_elements(here.sparse_block, ranks, key)
    # The share of elements with gradients: under LoRA none at the ends, and of the blocks only the factors.
    added = padded_factors(workload, here, ranks)
    blocks += added
    of_ends = 1.0 if lora is None else 0.0
    of_blocks = 1.0 if lora is None else added / blocks
    if workload.recipe.freezes and lora is None:
        of_ends = of_blocks = trained(workload, here).elements / (blocks + embedding + norm + head)

    def unit(elements: float, count: int, gradients: float, kind: Unit, narrow: float = 0.0) -> EqualPayloads:
        gathers = kind.gathers(round(elements), workload.tune.persist_below)
        return EqualPayloads(round(elements), round(elements * gradients), count, gathers, round(narrow))

    found = []
    if here.root:
        found.append(unit(embedding + norm, 1, of_ends, Unit((), whole=True)))
    elif here.first:
        found.append(unit(embedding, 1, of_ends, Unit((), looked_up=True)))
    # The network's last unit has the remaining blocks, and the norm.
    left = here.layers - (count - 1) * size if len(here.stages) == 1 else here.layers / count
    last = 1 if here.last else 0
    if count > last:
        each = (1 - last * left / here.layers) / (count - last)
        found.append(unit(blocks * each, count - last, of_blocks, Unit(()), narrow * each))
    if here.last:
        rest = blocks * left / here.layers + (0 if here.root else norm)
        found.append(unit(rest, 1, of_blocks, Unit((), whole=True), narrow * left / here.layers))
    if here.head.tensors:
        found.append(unit(head, 1, of_ends, Unit((), whole=True)))
    return found


# Exact traffic, tensor by tensor.


def exact(
    workload: Workload,
    here: RankParameters,
    stages: Sequence[Sequence[RankTensor]],
    trained: Sequence[Sequence[RankTensor]],
) -> list[CollectiveCall]:
    """Exact collectives by bucket or unit, for each stage of a rank. ``trained``: the tensors with gradients."""
    group = workload.groups[DENSE]
    shards = group.sharded.size
    if shards == 1:
        return []
    if group.zero == 3:
        made = [
            travelling
            for stage, tensors, added in zip(here.stages, stages, trained, strict=True)
            for travelling in _units(workload, here, stage, tensors, added, shards)
        ]
        return unit_calls(workload, made, group)
    filled = [bucket for tensors in trained for bucket in flat_buckets(workload, tensors, shards)]
    return bucket_calls(workload, filled, group)


def flat_buckets(workload: Workload, tensors: Sequence[RankTensor], shards: int) -> list[EqualPayloads]:
    """zero=1|2: the buckets of a stage, padded so that all ranks have equal chunks."""
    sizes = [
        shards * even_share(_flat_size(one), shards, _block(workload, one))
        for one in _buckets(workload, tensors)
    ]
    return [EqualPayloads(size, size, 1) for size in sizes]


def owned(
    workload: Workload, stages: Sequence[Sequence[RankTensor]], index: int
) -> list[tuple[RankTensor, int]]:
    """The tensors that rank ``index`` of a replica updates at least partly, with the number of elements it updates."""
    ranks = workload.groups[DENSE].sharded.size
    found = []
    for tensors in (with_gradients(workload, one) for one in stages):
        if ranks == 1:
            found += [(tensor, tensor.size) for tensor in tensors]
        elif workload.layout.zero == 3:
            for tensor in tensors:
                rows, *rest = tensor.shape
                share = even_share(rows, ranks)
                found.append((tensor, min(share, max(0, rows - index * share)) * math.prod(rest)))
        else:
            for bucket in _buckets(workload, tensors):
                of = {tensor.label: tensor for tensor in bucket}
                sizes = [(tensor.label, tensor.size) for tensor in bucket]
                found += [
                    (of[label], stop - start)
                    for label, start, stop in chunk_ranges(sizes, ranks, index, _block(workload, bucket))
                ]
    # Without sharding, every tensor belongs to the optimizer, even an empty one.
    return [(tensor, size) for tensor, size in found if size or ranks == 1]


def _buckets(workload: Workload, tensors: Sequence[RankTensor]) -> list[list[RankTensor]]:
    of = {tensor.label: tensor for tensor in with_gradients(workload, tensors)}
    width = gradient_width(workload.recipe)
    names = bucket_names(of.values(), width, bucket_bytes(workload), _kinds(workload))
    return [[of[label] for label in labels] for labels in names]


def _kinds(workload: Workload) -> BucketKinds:
    return BucketKinds.BLOCKWISE if workload.recipe.blockwise else BucketKinds.FLAT


def _block(workload: Workload, bucket: Sequence[RankTensor]) -> int:
    """Elements of a bucket that must stay together."""
    return (bucket[0].block or 1) if workload.recipe.blockwise else 1


def _flat_size(bucket: Iterable[RankTensor]) -> int:
    return sum(tensor.size for tensor in bucket)


def _units(
    workload: Workload,
    here: RankParameters,
    stage: Stage,
    tensors: Sequence[RankTensor],
    trained: Sequence[RankTensor],
    ranks: int,
) -> list[EqualPayloads]:
    """The units of a stage; a unit with an empty path is the root, which takes all tensors that no other unit has."""
    made = units(stage.layers, workload.layout.unit, stage.first, stage.last, here.root)
    home = {path: number for number, unit in enumerate(made) for path in unit.modules}
    members: list[list[RankTensor]] = [[] for _ in made]
    frozen = [] if workload.lora is None else tensors
    for tensor in (*frozen, *trained):
        block, module = ".".join(tensor.label.split(".")[:3]), tensor.label.rpartition(".")[0]
        path = next((path for path in (block, module) if path in home), "")
        members[home[path]].append(tensor)
    found, still = [], {tensor.name for tensor in frozen}
    for unit, inside in zip(made, members, strict=True):
        elements = sum(padded_size(tensor, ranks) for tensor in inside)
        gathers = unit.gathers(sum(tensor.size for tensor in inside), workload.tune.persist_below)
        if workload.lora is not None and workload.lora.base == "nf4":
            narrow = sum(padded_size(tensor, ranks) for tensor in inside if in_four_bits(tensor))
        else:
            narrow = sum(tensor.size for tensor in inside if is_projection(tensor, ranks))
        moved = [one for one in with_gradients(workload, inside) if one.name not in still]
        reduced = sum(padded_size(tensor, ranks) for tensor in moved)
        found.append(EqualPayloads(elements, reduced, 1, gathers, narrow))
    return found
