"""A pipeline rank's inventory: its stages, their parameter counts, bytes per parameter and per micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

from shoal.facts.bytes_per_parameter import BytesPerParameter
from shoal.facts.layout.offload_activations import blocks_away
from shoal.facts.layout.parameter_groups import DENSE, EXPERTS
from shoal.facts.layout.stages import Stage, rank_of_stage, stages_of_rank
from shoal.facts.model import Adapters, Model
from shoal.facts.recipe import frozen_names
from shoal.facts.schedules.programs import SPLIT_BACKWARD
from shoal.predict.memory.in_flight import bottom
from shoal.predict.memory.micro_batch import (
    BlockKind,
    MicroBatchBytes,
    block_kind,
    micro_batch_bytes,
    parameters_are_sharded,
    rank_bytes,
)
from shoal.predict.offload_cut import share_away
from shoal.predict.rank_parameters import (
    NetworkEnds,
    ParameterCount,
    ShardDegrees,
    adapter_key,
    block_count,
    cut_once,
    end_counts,
    expert_elements,
    total,
)
from shoal.predict.workload import Workload


class BlockRun(NamedTuple):
    """Neighbouring blocks of one kind."""

    kind: BlockKind
    layers: int
    block: ParameterCount  # one of them

    @property
    def experts(self) -> bool:
        return self.kind.experts

    @property
    def frozen(self) -> frozenset[str]:
        return self.kind.frozen


class RankStage(NamedTuple):
    """One stage on a rank."""

    first: bool
    last: bool
    runs: tuple[BlockRun, ...]  # in the order of the network
    layers: int
    blocks: ParameterCount  # all of them
    ends: ParameterCount  # embedding, final norm, head, as far as they are here

    def last_blocks(self, count: int) -> ParameterCount:
        """Of so many blocks at the end, whose backward passes come first; where runs differ by what is frozen alone."""
        if not any(run.frozen for run in self.runs):
            return ParameterCount(*(value * count // self.layers for value in self.blocks))
        found, left = ParameterCount(), count
        for run in reversed(self.runs):
            found = total((found, run.block.times(min(left, run.layers))))
            left -= min(left, run.layers)
        return found


class InFlight(NamedTuple):
    """What a micro-batch in flight holds of one stage, in bytes."""

    blocks: float
    away: float  # of these, what waits off the device
    others: float  # tables of rotary positions; the embedding's dropout; the final norm and its result
    logits: float
    casts: float  # the blocks' weights in the compute precision, where autograd keeps them
    head_cast: float  # and the head's
    messages: float  # to and from other stages
    deferred: float  # once only weight gradients are left to compute


@dataclass(frozen=True)
class RankInventory:
    workload: Workload
    number: int  # among the ranks of the pipeline
    stages: tuple[RankStage, ...]
    ends: NetworkEnds  # of the whole network
    hold: BytesPerParameter  # bytes per parameter
    micro_batch: MicroBatchBytes
    sharded: bool  # parameters rest in shards
    shard: int = 0  # of the data ranks that share optimizer states, this one

    @cached_property
    def total(self) -> ParameterCount:
        return total(count for stage in self.stages for count in (stage.blocks, stage.ends))

    def gathered(self, count: ParameterCount) -> float:
        """Bytes of parameters where ranks that shard them have gathered them."""
        compute, narrow = self.hold.compute, self.workload.gathered_width
        elements = count.whole + (0 if self.workload.lora is None else count.trained)
        return compute * elements - (compute - narrow) * count.projections

    @cached_property
    def whole_experts(self) -> int:
        """Under zero=3, routed experts of a layer that no other rank of a copy holds: whole, with a master copy."""
        groups = self.workload.groups
        if not self.sharded or EXPERTS not in groups or groups[EXPERTS].sharded.size > 1:
            return 0
        return expert_elements(self.workload.model, self.workload.layout.tp, self.workload.layout.ep)

    @cached_property
    def lone_experts(self) -> int:
        """Experts here that no other rank holds: their gradients wait in no bucket, and appear as they are computed."""
        group = self.workload.groups.get(EXPERTS)
        if group is None or not group.trained or group.sharded.size * group.replicated.size > 1:
            return 0
        each = expert_elements(self.workload.model, self.workload.layout.tp, self.workload.layout.ep)
        return each * sum(run.layers for one in self.stages for run in one.runs if run.experts)

    @cached_property
    def all_whole_experts(self) -> int:
        """Of all layers here."""
        return self.whole_experts * sum(run.layers for one in self.stages for run in one.runs if run.experts)

    @cached_property
    def casts(self) -> bool:
        """Whether blocks' weights are cast to the compute precision where they are used."""
        return self.hold.cast and not self.sharded and self.workload.lora is None

    @cached_property
    def casts_again(self) -> bool:
        """For the backward pass, because it repeats the forward pass or is compiled; else autograd keeps them."""
        return self.casts and (self.workload.layout.recompute != "none" or self.workload.compiled)

    @cached_property
    def bottom(self) -> bool:
        """Whether both sides of a V's lower end are here: one stage passes to the next without a message."""
        return bottom(self.workload.layout.schedule, self.workload.layout.pp, self.number)

    @cached_property
    def in_flight(self) -> list[InFlight]:
        return [self._in_flight(number, stage) for number, stage in enumerate(self.stages)]

    def offloaded(self, what: str) -> float:
        """The share of optimizer, params or activations that waits off the device."""
        if not self.workload.layout.offload:
            return 0.0
        return share_away(self.workload, what, self.number, self.shard)

    @cached_property
    def data_ranks(self) -> int:
        """Those that sum a gradient."""
        return self.workload.layout.dp * self.workload.layout.shards

    def run_of(self, number: int, block: int) -> BlockRun:
        """The run of a stage that a block is in, counted from the stage's first."""
        for run in self.stages[number].runs:
            if block < run.layers:
                return run
            block -= run.layers
        raise IndexError(block)

    def on_nvme(self, what: str) -> bool:
        return any(part.what == what and part.nvme for part in self.workload.layout.offload)

    def blocks_away(self, number: int) -> range:
        """Of a stage's blocks, those whose activations wait off the device."""
        stage, fraction = self.stages[number], self.offloaded("activations")
        return blocks_away(stage.layers, fraction, stage.first, stage.last) if fraction else range(0)

    def away_among(self, number: int, begin: int, end: int) -> int:
        """How many of them are among the blocks from ``begin`` to before ``end``."""
        away = self.blocks_away(number)
        return max(0, min(away.stop, end) - max(away.start, begin))

    def hears_from_next(self, number: int) -> bool:
        """Whether a stage's successor is on another rank, which it sends activations to and has gradients from."""
        return not self.stages[number].last and not (self.bottom and number == 0)

    def hears_from_previous(self, number: int) -> bool:
        """Whether its predecessor is, which it has activations from and sends gradients to."""
        return not self.stages[number].first and not (self.bottom and number == 1)

    def _in_flight(self, number: int, stage: RankStage) -> InFlight:
        micro, hidden = self.micro_batch, self.workload.model.hidden
        kinds = [(run.layers, micro.blocks[run.kind]) for run in stage.runs]
        blocks = sum(layers * one.resting for layers, one in kinds)
        away, begin = 0.0, 0
        for layers, one in kinds:
            away += self.away_among(number, begin, begin + layers) * one.resting
            begin += layers
        others = micro.tables + (micro.norm if stage.last else 0.0) + (micro.dropped if stage.first else 0.0)
        messages = 0.0
        if self.workload.layout.pp > 1:
            if not stage.first and kinds[0][1].held_input:
                blocks -= micro.stream  # it counts as what it came as
            messages = micro.stream * (self.hears_from_previous(number) + self.hears_from_next(number))
            if self.bottom and number == 0:
                others += micro.stream  # what it hands to the stage beside it
        kept = self.casts and not self.casts_again
        return InFlight(
            blocks=blocks,
            away=away,
            others=others,
            logits=micro.logits.resting if stage.last else 0.0,
            casts=self.hold.compute * (stage.blocks.whole + hidden * stage.last) if kept else 0.0,
            head_cast=micro.logits.cast if stage.last else 0.0,
            messages=messages,
            deferred=sum(layers * one.deferred for layers, one in kinds),
        )


def rank_inventories(workload: Workload) -> Iterator[RankInventory]:
    """Of every rank of the pipeline."""
    return _inventories(workload, range(workload.layout.pp))


def fullest_ranks(workload: Workload) -> Iterator[RankInventory]:
    """Of those ranks that can be the fullest."""
    return _inventories(workload, _pipeline(workload).fullest)


class PipelineStages(NamedTuple):
    """Every rank's, and which ranks can be the fullest."""

    ranks: tuple[tuple[RankStage, ...], ...]
    ends: NetworkEnds
    fullest: tuple[int, ...]


def _inventories(workload: Workload, ranks: Iterable[int]) -> Iterator[RankInventory]:
    pipeline, micro_batch = _pipeline(workload), micro_batch_bytes(workload)
    sharded = parameters_are_sharded(workload)
    hold = rank_bytes(workload)
    for rank in ranks:
        yield RankInventory(workload, rank, pipeline.ranks[rank], pipeline.ends, hold, micro_batch, sharded)


def _pipeline(workload: Workload) -> PipelineStages:
    layout, groups = workload.layout, workload.groups
    routed = groups.get(EXPERTS, groups[DENSE])
    return _cut(
        workload.model,
        ShardDegrees(layout.tp, layout.ep, groups[DENSE].sharded.size, routed.sharded.size),
        adapter_key(workload.lora, workload.model),
        frozen_names(workload.model, workload.recipe),
        (layout.schedule, layout.pp, layout.chunks),
        workload.recipe.seq,
        workload.stack.even_stages,
    )


@lru_cache(maxsize=4096)
def _cut(
    model: Model,
    degrees: ShardDegrees,
    lora: Adapters | None,
    frozen: frozenset[str],
    pipeline: tuple[str, int, int],
    seq: int,
    even: bool,
) -> PipelineStages:
    schedule, pp, chunks = pipeline
    stages = cut_once(model, pp * chunks, None if even else seq)
    at_the_ends = end_counts(model, degrees, lora is None, frozen)

    def stage_of(stage: Stage) -> RankStage:
        def kind(layer: int) -> BlockKind:
            return block_kind(model, layer, seq, frozen, lora is not None)

        runs = tuple(
            BlockRun(one, len(list(layers)), block_count(model, one.experts, degrees, lora, one.frozen))
            for one, layers in groupby(stage.layers, key=kind)
        )
        here = [at_the_ends.embedding] * stage.first + [at_the_ends.norm] * stage.last
        # In a pipeline a tied head is a copy of the embedding.
        here += [at_the_ends.head] * (stage.last and not (model.tied and pp == 1))
        blocks = total(run.block.times(run.layers) for run in runs)
        return RankStage(stage.first, stage.last, runs, len(stage.layers), blocks, total(here))

    ranks = tuple(
        tuple(stage_of(stages[number]) for number in stages_of_rank(pp, chunks, schedule, rank))
        for rank in range(pp)
    )
    last = rank_of_stage(pp, chunks, schedule, pp * chunks - 1)
    return PipelineStages(ranks, at_the_ends, _fullest(ranks, last, schedule))


def _fullest(ranks: tuple[tuple[RankStage, ...], ...], last: int, schedule: str) -> tuple[int, ...]:
    """The two ends, and of ranks with equal blocks the first, which holds the most micro-batches.

    The first rank is a kind of its own: it receives no activations. So is the bottom of a V, where the two stages of a
    rank send each other nothing. Where the backward pass is split also the last of each kind, which has put off the
    most of it.
    """
    first: dict[tuple[object, ...], int] = {}
    final: dict[tuple[object, ...], int] = {}
    for rank, stages in enumerate(ranks):
        end = "first" if rank == 0 else "bottom" if bottom(schedule, len(ranks), rank) else ""
        kind = end, *(stage.runs for stage in stages)
        first.setdefault(kind, rank)
        final[kind] = rank
    late = final.values() if schedule in SPLIT_BACKWARD else ()
    return tuple(sorted({0, last, *first.values(), *late}))
