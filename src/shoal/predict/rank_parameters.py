"""The parameters that one rank holds, tensor by tensor and as counts, and which of them are trained."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import NamedTuple

from shoal.facts.blockwise import block_length
from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.facts.layout.buckets import buckets_by_kind, even_share, flat_kind, sharded_dimension
from shoal.facts.layout.float8 import gathered_alike
from shoal.facts.layout.stages import Stage, cut, rank_of_stage, stages_of_rank
from shoal.facts.model import Adapters, Model
from shoal.facts.model.parameters import (
    BLOCKS,
    HEAD,
    Parameter,
    adapters,
    block_parameters,
    end_parameters,
    expert_parameters,
    stacked_experts,
)
from shoal.facts.model.tensor_split import SummedOver, summed_over, tensor_part
from shoal.facts.nf4 import packs
from shoal.predict.workload import Workload

# Bucket counts are extrapolated: this many layers are cut into buckets, then twice as many; the difference is what
# further layers add.
SAMPLE = 8


class RankTensor(NamedTuple):
    """One rank's part of a parameter."""

    name: str  # canonical; for a head that copies a tied embedding, the embedding's
    label: str  # its name on this rank
    shape: tuple[int, ...]
    copies: int  # tensor ranks that hold this same part
    summed: SummedOver
    block: int | None = None  # elements per quantization block, if moments are blockwise

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Component:
    """A part of the network that is placed as a whole: the embedding, a block, the norm, the head."""

    tensors: tuple[RankTensor, ...]
    elements: int
    tensor_summed: int  # of these, elements whose gradients are reduced over the tensor group
    copies_summed: int  # and over its ranks that share the same key/value head


@dataclass(frozen=True, eq=False)
class RankParameters:
    """What one pipeline rank holds over all its stages, without routed experts, which other ranks share."""

    stages: tuple[Stage, ...]
    dense: int  # layers with an ordinary MLP
    sparse: int  # layers with experts
    first: bool
    last: bool
    links: int  # cuts between a stage here and its neighbour on another rank
    end: bool  # whether a tied embedding has its other copy on another rank
    root: bool  # whether embedding and head are one matrix, which then stays gathered with the norm
    embedding: Component
    dense_block: Component
    sparse_block: Component
    norm: Component
    head: Component

    @property
    def layers(self) -> int:
        return self.dense + self.sparse


def rank_parameters(
    layout: Layout, model: Model, seq: int | None, stage: int, index: int = 0
) -> RankParameters:
    """What pipeline rank ``stage`` holds at index ``index`` of its tensor group; index 0 has the largest parts."""
    return _rank_parameters(
        model, layout.tp, layout.sp, layout.pp, layout.chunks, layout.schedule, seq, stage, index
    )


@cache
def _rank_parameters(
    model: Model,
    tp: int,
    sp: bool,
    pp: int,
    chunks: int,
    schedule: str,
    seq: int | None,
    stage: int,
    index: int,
) -> RankParameters:
    stages = stages_here(model, pp, chunks, schedule, seq, stage)
    first, last = stages[0].first, stages[-1].last
    sparse = sum(model.has_experts(layer) for one in stages for layer in one.layers)
    dense = sum(len(one.layers) for one in stages) - sparse
    nothing = component_of(())
    body = _body(model, tp, sp, index)
    embedding = body.embedding if first else nothing
    norm = body.norm if last else nothing
    head = nothing
    if last and not model.tied:
        head = body.head
    elif last and pp > 1:
        head = body.copied_head
    neighbours = [
        number for one in stages for number in (one.index - 1, one.index + 1) if 0 <= number < pp * chunks
    ]
    return RankParameters(
        stages=stages,
        dense=dense,
        sparse=sparse,
        first=first,
        last=last,
        links=sum(rank_of_stage(pp, chunks, schedule, number) != stage for number in neighbours),
        end=model.tied and first != last,
        root=model.tied and pp == 1,
        embedding=embedding,
        dense_block=body.dense,
        sparse_block=body.sparse,
        norm=norm,
        head=head,
    )


def stages_here(
    model: Model, pp: int, chunks: int, schedule: str, seq: int | None, stage: int
) -> tuple[Stage, ...]:
    """The stages on one pipeline rank, in network order."""
    stages = cut_once(model, pp * chunks, seq)
    return tuple(stages[number] for number in stages_of_rank(pp, chunks, schedule, stage))


@cache
def cut_once(model: Model, count: int, seq: int | None) -> list[Stage]:
    return cut(model, count, seq)


class _Body(NamedTuple):
    embedding: Component
    dense: Component
    sparse: Component
    norm: Component
    head: Component
    copied_head: Component
    expert: Component  # one routed expert


@cache
def _body(model: Model, tp: int, sp: bool, index: int) -> _Body:
    """The parts of a network on one tensor rank. Blocks differ only in having experts or not."""

    def component(parameters: Iterable[Parameter]) -> Component:
        return component_of(tensor_on(parameter, tp, sp, index) for parameter in parameters)

    ends = end_parameters(model)
    embedding = component(ends.embedding)
    return _Body(
        embedding=embedding,
        dense=component(block_parameters(model, False)),
        sparse=component(block_parameters(model, True)),
        norm=component(ends.norm),
        head=component(ends.head),
        copied_head=component_of([embedding.tensors[0]._replace(label=HEAD)]),
        expert=component(expert_parameters(model)),
    )


def tensor_on(parameter: Parameter, tp: int, sp: bool, index: int) -> RankTensor:
    """A rank's part of a parameter."""
    part, name = tensor_part(parameter, tp, index), parameter.name
    summed = summed_over(parameter, tp, sp)
    return RankTensor(name, name, part.box.shape, part.copies, summed, block_length(parameter.shape))


def component_of(tensors: Iterable[RankTensor]) -> Component:
    listed = tuple(tensors)
    return Component(
        listed,
        sum(tensor.size for tensor in listed),
        sum(tensor.size for tensor in listed if tensor.summed == "tensor"),
        sum(tensor.size for tensor in listed if tensor.summed == "copies"),
    )


def named_tensors(here: RankParameters, model: Model, stage: Stage) -> list[RankTensor]:
    """Every tensor of a stage, in forward order and under its own name."""
    found = list(here.embedding.tensors) if stage.first else []
    for layer in stage.layers:
        block = here.sparse_block if model.has_experts(layer) else here.dense_block
        for tensor in block.tensors:
            name = in_layer(tensor.name, layer)
            found.append(tensor._replace(name=name, label=name))
    return [*found, *here.norm.tensors, *here.head.tensors] if stage.last else found


@lru_cache(maxsize=256)
def expert_tensors(model: Model, tp: int, ep: int, stage: Stage) -> tuple[RankTensor, ...]:
    """A rank's part of a stage's routed experts, in forward order; no rank of the tensor group has more."""
    return tuple(
        RankTensor(
            one.name, one.name, tensor_part(one, tp, 0, ep).box.shape, 1, None, block_length(one.shape)
        )
        for layer in stage.layers
        if model.has_experts(layer)
        for one in stacked_experts(model, layer)
    )


def in_layer(name: str, layer: int) -> str:
    """A block tensor's name, moved to another layer."""
    return re.sub(r"^model\.layers\.\d+\.", f"model.layers.{layer}.", name)


# Trained parameters.


def adapter_key(lora: Lora | None, model: Model) -> Adapters | None:
    """The hashable part of LoRA's settings that matters here."""
    return None if lora is None else lora.adapters_of(model)


@cache
def _factors(model: Model, experts: bool, lora: Adapters, tp: int, sp: bool, index: int = 0) -> Component:
    """LoRA's factors of one block."""
    return component_of(
        tensor_on(factor, tp, sp, index)
        for parameter in block_parameters(model, experts)
        for factor in adapters(parameter, lora)
    )


def named_factors(workload: Workload, stage: Stage, index: int) -> list[RankTensor]:
    """LoRA's factors of one stage at ``index`` of the tensor group, in forward order and under their own names."""
    lora, layout, model = adapter_key(workload.lora, workload.model), workload.layout, workload.model
    if lora is None:
        return []
    found = []
    for layer in stage.layers:
        for tensor in _factors(model, model.has_experts(layer), lora, layout.tp, layout.sp, index).tensors:
            name = in_layer(tensor.name, layer)
            found.append(tensor._replace(name=name, label=name))
    return found


def padded_factors(workload: Workload, here: RankParameters, ranks: int) -> int:
    """Elements of LoRA's factors when all-gathered from ``ranks``, padding included."""
    lora, layout = adapter_key(workload.lora, workload.model), workload.layout
    if lora is None:
        return 0
    kinds = [_factors(workload.model, experts, lora, layout.tp, layout.sp) for experts in (False, True)]
    return here.dense * padded(kinds[0], ranks) + here.sparse * padded(kinds[1], ranks)


class Trained(NamedTuple):
    """Parameters with gradients on a rank, and how many of these are reduced over other than data ranks."""

    elements: int
    tensor_summed: int
    copies_summed: int


def trained(workload: Workload, here: RankParameters) -> Trained:
    """All trained parameters but routed experts; with ``lora`` the factors of every block's targeted projections."""
    lora, layout = adapter_key(workload.lora, workload.model), workload.layout
    if lora is None and workload.recipe.freezes:
        stages = [named_tensors(here, workload.model, stage) for stage in here.stages]
        some = component_of(one for stage in stages for one in with_gradients(workload, stage))
        return Trained(some.elements, some.tensor_summed, some.copies_summed)
    if lora is None:
        blocks, others = [here.dense_block, here.sparse_block], [here.embedding, here.norm, here.head]
    else:
        others = []
        blocks = [_factors(workload.model, experts, lora, layout.tp, layout.sp) for experts in (False, True)]
    counted = [(here.dense, blocks[0]), (here.sparse, blocks[1]), *((1, one) for one in others)]
    return Trained(*(sum(count * getattr(one, what) for count, one in counted) for what in Trained._fields))


def trained_with_experts(workload: Workload, here: RankParameters) -> int:
    found, layout = trained(workload, here).elements, workload.layout
    if workload.lora is not None:
        return found
    if workload.recipe.freezes:
        routed = (expert_tensors(workload.model, layout.tp, layout.ep, stage) for stage in here.stages)
        return found + sum(one.size for tensors in routed for one in with_gradients(workload, tensors))
    return found + here.sparse * expert_elements(workload.model, layout.tp, layout.ep)


def with_gradients(workload: Workload, tensors: Iterable[RankTensor]) -> list[RankTensor]:
    """Tensors that no recipe group freezes."""
    recipe = workload.recipe
    return [one for one in tensors if not recipe.freezes or not recipe.frozen(one.name)]


def expert_elements(model: Model, tp: int, ep: int) -> int:
    """Parameters of one layer's routed experts on one rank, before any sharding."""
    return model.experts.count // ep * _body(model, tp, False, 0).expert.elements if model.experts else 0


# Counts, and a rank's share of them where its group is sharded.


class ParameterCount(NamedTuple):
    """Parameters of the tensor rank that holds the most. LoRA's factors count only as ``trained``."""

    whole: int = 0  # unsharded
    share: int = 0  # rows, padded, that each rank keeps when they are sharded
    trained: int = 0
    trained_share: int = 0
    projections: int = 0  # of a block: gathered in fp8 or NF4, if anything is; stored in NF4
    packed_experts: int = 0  # of these, routed experts'

    def times(self, count: int) -> ParameterCount:
        return ParameterCount(*(count * value for value in self))


class NetworkEnds(NamedTuple):
    embedding: ParameterCount  # with learned positions
    norm: ParameterCount
    head: ParameterCount  # also for a tied model, where it may be a copy


class ShardDegrees(NamedTuple):
    """Over how many ranks parameters are split and sharded."""

    tp: int
    ep: int
    ranks: int  # ranks that shard what every data rank uses
    expert_ranks: int  # ranks that shard an expert


def total(counts: Iterable[ParameterCount]) -> ParameterCount:
    return ParameterCount(*map(sum, zip(*counts, strict=True)))


@lru_cache(maxsize=4096)
def block_count(
    model: Model,
    experts: bool,
    degrees: ShardDegrees,
    lora: Adapters | None,
    frozen: frozenset[str] = frozenset(),
) -> ParameterCount:
    """One block, with routed experts or with an ordinary MLP. ``frozen``: names within the block."""
    body = _body(model, degrees.tp, False, 0)
    found = _counted(body.sparse if experts else body.dense, degrees.ranks, lora is None, frozen)
    found = found._replace(
        projections=narrow_elements(body.sparse if experts else body.dense, degrees.ranks, lora)
    )
    if experts and model.experts:
        routed = expert_stack(model, degrees.tp, degrees.ep)
        stack = _counted(routed, degrees.expert_ranks, lora is None, frozen)
        if lora is not None and lora.base == "nf4":
            narrow = narrow_elements(routed, degrees.expert_ranks, lora)
            stack = stack._replace(projections=narrow, packed_experts=narrow)
        found = total((found, stack))
    if lora is None:
        return found
    factors = _counted(_factors(model, experts, lora, degrees.tp, False), degrees.ranks)
    return found._replace(trained=factors.trained, trained_share=factors.trained_share)


@cache
def expert_stack(model: Model, tp: int, ep: int) -> Component:
    """One rank's experts of one layer."""
    sparse = next(layer for layer in range(model.layers) if model.has_experts(layer))
    return component_of(expert_tensors(model, tp, ep, Stage(0, range(sparse, sparse + 1), False, False)))


@lru_cache(maxsize=1024)
def end_counts(
    model: Model, degrees: ShardDegrees, trained: bool = True, frozen: frozenset[str] = frozenset()
) -> NetworkEnds:
    """The parameters before the first block and after the last one."""
    body = _body(model, degrees.tp, False, 0)
    return NetworkEnds(
        *(_counted(one, degrees.ranks, trained, frozen) for one in (body.embedding, body.norm, body.head))
    )


def _counted(
    component: Component, ranks: int, trained: bool = True, frozen: frozenset[str] = frozenset()
) -> ParameterCount:
    """``frozen``: names, without the block's prefix."""
    found = component.elements, padded(component, ranks) // ranks
    if not trained:
        return ParameterCount(*found, 0, 0)
    moving = component_of(one for one in component.tensors if in_block(one.name) not in frozen)
    return ParameterCount(*found, moving.elements, padded(moving, ranks) // ranks)


def in_block(name: str) -> str:
    """A tensor's name within its block."""
    return re.sub(r"^model\.layers\.\d+\.", "", name)


# Sizes in communication.


@cache
def padded(component: Component, ranks: int) -> int:
    """Elements of the component when all-gathered, with every tensor's rows padded to a multiple of ``ranks``."""
    return sum(padded_size(tensor, ranks) for tensor in component.tensors)


@cache
def projections(block: Component, ranks: int) -> int:
    """Elements of a block that ``ranks`` all-gather in fp8."""
    return sum(tensor.size for tensor in block.tensors if is_projection(tensor, ranks))


def narrow_elements(component: Component, ranks: int, lora: Adapters | None) -> int:
    """Padded elements of a block that are all-gathered in a narrower precision, if the run does so at all."""
    if lora is None or lora.base != "nf4":
        return projections(component, ranks)
    return sum(padded_size(tensor, ranks) for tensor in component.tensors if in_four_bits(tensor))


def in_four_bits(tensor: RankTensor) -> bool:
    """Whether the weight is in 4 bits, in a run with a 4-bit base model (``facts/nf4.py``)."""
    return packs(tensor.name, tensor.shape)


def is_projection(tensor: RankTensor, ranks: int) -> bool:
    return tensor.name.startswith(BLOCKS) and gathered_alike(tensor.shape, ranks)


def padded_size(tensor: RankTensor, ranks: int) -> int:
    if sharded_dimension(tensor.shape, ranks):
        return tensor.size
    rows, *rest = tensor.shape
    return ranks * even_share(rows, ranks) * math.prod(rest)


class BucketKinds(Enum):
    """Which parameters may share a bucket."""

    ANY = "any"
    FLAT = "flat"  # only parameters that other ranks find in buckets of the same sizes
    BLOCKWISE = "blockwise"  # and with the same quantization block length


def bucket_count(here: RankParameters, width: int, bucket_bytes: int, kinds: BucketKinds) -> int:
    """Approximate number of buckets that a rank's gradients fill, extrapolated from a few layers."""
    ends = _buckets_in(here.embedding, width, bucket_bytes, kinds)
    ends += _buckets_in(here.head, width, bucket_bytes, kinds)
    layers = here.dense * _buckets_a_layer(here.dense_block, width, bucket_bytes, kinds)
    layers += here.sparse * _buckets_a_layer(here.sparse_block, width, bucket_bytes, kinds)
    return ends + max(len(here.stages), round(layers))


def bucket_names(
    tensors: Iterable[RankTensor], width: int, bucket_bytes: int, kinds: BucketKinds
) -> list[list[str]]:
    """The labels in each bucket."""
    block = kinds is BucketKinds.BLOCKWISE
    return buckets_by_kind(
        (
            (
                tensor.label,
                tensor.size * width,
                None
                if kinds is BucketKinds.ANY
                else flat_kind(tensor.label, tensor.name, tensor.copies, tensor.block if block else None),
            )
            for tensor in tensors
        ),
        bucket_bytes,
    )


@cache
def _buckets_in(component: Component, width: int, bucket_bytes: int, kinds: BucketKinds) -> int:
    return len(bucket_names(component.tensors, width, bucket_bytes, kinds))


@cache
def _buckets_a_layer(block: Component, width: int, bucket_bytes: int, kinds: BucketKinds) -> float:
    def count(layers: int) -> int:
        tensors = [
            tensor._replace(label=f"{layer} {tensor.label}")
            for layer in range(layers)
            for tensor in block.tensors
        ]
        return len(bucket_names(tensors, width, bucket_bytes, kinds))

    return (count(2 * SAMPLE) - count(SAMPLE)) / SAMPLE
