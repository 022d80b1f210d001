"""What a pipeline rank holds: its stages, their parameter counts, bytes per parameter and per micro-batch."""

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
    """Consecutive blocks of one kind."""

    kind: BlockKind
    layers: int
    block: ParameterCount  # one block

    @property
    def experts(self) -> bool:
        return self.kind.experts

    @property
    def frozen(self) -> frozenset[str]:
        return self.kind.frozen


class RankStage(NamedTuple):
    """One stage of a rank."""

    first: bool
    last: bool
    runs: tuple[BlockRun, ...]  # in network order
    layers: int
    blocks: ParameterCount  # all blocks together
    ends: ParameterCount  # embedding, final norm and head, whichever are on this stage

    def last_blocks(self, count: int) -> ParameterCount:
        """The last ``count`` blocks, whose backward passes come first."""
        if len(self.runs) == 1:
            return self.runs[0].block.times(count)
        found, left = ParameterCount(), count
        for run in reversed(self.runs):
            found = total((found, run.block.times(min(left, run.layers))))
            left -= min(left, run.layers)
        return found

    def share_of_experts(self, count: int) -> float:
        """The share of the stage's blocks with experts that are among the last ``count``."""
        found, left, all_here = 0, count, 0
        for run in reversed(self.runs):
            found += min(left, run.layers) * run.experts
            all_here += run.layers * run.experts
            left -= min(left, run.layers)
        return found / all_here if all_here else 0.0


class InFlight(NamedTuple):
    """Bytes that one micro-batch in flight holds for one stage."""

    blocks: float
    away: float  # of these, offloaded
    others: float  # rotary tables; what the embedding saves; the final norm and its output
    logits: float
    casts: float  # the blocks' weights cast to the compute precision, if autograd saves them
    head_cast: float  # the head's cast weight
    messages: float  # to and from other stages
    deferred: float  # once only the weight gradients remain to be computed


@dataclass(frozen=True)
class RankInventory:
    workload: Workload
    number: int  # pipeline rank
    stages: tuple[RankStage, ...]
    ends: NetworkEnds  # of the whole network
    hold: BytesPerParameter  # bytes per parameter
    micro_batch: MicroBatchBytes
    sharded: bool  # parameters are stored as shards
    shard: int = 0  # index among the data ranks that shard optimizer states

    @cached_property
    def total(self) -> ParameterCount:
        return total(count for stage in self.stages for count in (stage.blocks, stage.ends))

    def gathered(self, count: ParameterCount) -> float:
        """Bytes of parameters once all-gathered."""
        compute, narrow = self.hold.compute, self.workload.gathered_width
        elements = count.whole + (0 if self.workload.lora is None else count.trained)
        return compute * elements - (compute - narrow) * count.projections

    @cached_property
    def whole_experts(self) -> int:
        """Under zero=3, a layer's routed experts that no other rank of the replica holds, so unsharded."""
        groups = self.workload.groups
        if not self.sharded or EXPERTS not in groups or groups[EXPERTS].sharded.size > 1:
            return 0
        return expert_elements(self.workload.model, self.workload.layout.tp, self.workload.layout.ep)

    @cached_property
    def lone_experts(self) -> int:
        """Experts held by this rank alone: their gradients are not bucketed and appear as they are computed."""
        group = self.workload.groups.get(EXPERTS)
        if group is None or not group.trained or group.sharded.size * group.replicated.size > 1:
            return 0
        each = expert_elements(self.workload.model, self.workload.layout.tp, self.workload.layout.ep)
        return each * sum(run.layers for one in self.stages for run in one.runs if run.experts)

    @cached_property
    def all_whole_experts(self) -> int:
        """Unsharded experts of all layers here."""
        return self.whole_experts * sum(run.layers for one in self.stages for run in one.runs if run.experts)

    @cached_property
    def casts(self) -> bool:
        """Whether blocks cast their weights to the compute precision on use."""
        return self.hold.cast and not self.sharded and self.workload.lora is None

    @cached_property
    def casts_again(self) -> bool:
        """Whether the backward pass casts again, being recomputed or compiled; otherwise autograd saves the cast."""
        return self.casts and (self.workload.layout.recompute != "none" or self.workload.compiled)

    @cached_property
    def bottom(self) -> bool:
        """Whether this rank is the bottom of a V, where one stage passes to the next without a message."""
        return bottom(self.workload.layout.schedule, self.workload.layout.pp, self.number)

    @cached_property
    def in_flight(self) -> list[InFlight]:
        return [self._in_flight(number, stage) for number, stage in enumerate(self.stages)]

    def offloaded(self, what: str) -> float:
        """The share of optimizer, params or activations that is offloaded."""
        if not self.workload.layout.offload:
            return 0.0
        return share_away(self.workload, what, self.number, self.shard)

    @cached_property
    def data_ranks(self) -> int:
        """Number of ranks that reduce a gradient."""
        return self.workload.layout.dp * self.workload.layout.shards

    def run_of(self, number: int, block: int) -> BlockRun:
        """The run that contains a block, given its index in the stage."""
        for run in self.stages[number].runs:
            if block < run.layers:
                return run
            block -= run.layers
        raise IndexError(block)

    def on_nvme(self, what: str) -> bool:
        return any(part.what == what and part.nvme for part in self.workload.layout.offload)

    def blocks_away(self, number: int) -> range:
        """The blocks of a stage whose activations are offloaded."""
        stage, fraction = self.stages[number], self.offloaded("activations")
        return blocks_away(stage.layers, fraction, stage.first, stage.last) if fraction else range(0)

    def away_among(self, number: int, begin: int, end: int) -> int:
        """How many blocks in [begin, end) have offloaded activations."""
        away = self.blocks_away(number)
        return max(0, min(away.stop, end) - max(away.start, begin))

    def hears_from_next(self, number: int) -> bool:
        """Whether the next stage is on another rank, to which activations go and from which gradients come."""
        return not self.stages[number].last and not (self.bottom and number == 0)

    def hears_from_previous(self, number: int) -> bool:
        """Whether the previous stage is on another rank, from which activations come and to which gradients go."""
        return not self.stages[number].first and not (self.bottom and number == 1)

    def _in_flight(self, number: int, stage: RankStage) -> InFlight:
        micro, hidden = self.micro_batch, self.workload.model.hidden
        kinds = [(run.layers, micro.blocks[run.kind]) for run in stage.runs]
        blocks = sum(layers * one.resting for layers, one in kinds)
        away, begin = 0.0, 0
        for layers, one in kinds:
            away += self.away_among(number, begin, begin + layers) * one.resting
            begin += layers
        of_first, of_last = micro.dropped + micro.places, micro.norm
        others = micro.tables + of_last * stage.last + of_first * stage.first
        messages = 0.0
        if self.workload.layout.pp > 1:
            if not stage.first and kinds[0][1].held_input:
                blocks -= micro.stream  # already counted as the received message
            messages = micro.stream * (self.hears_from_previous(number) + self.hears_from_next(number))
            if self.bottom and number == 0:
                others += micro.stream  # the output that it passes to the stage on this same rank
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
    """The inventory of every pipeline rank."""
    return _inventories(workload, range(workload.layout.pp))


def fullest_ranks(workload: Workload) -> Iterator[RankInventory]:
    """The inventories of the ranks that can have the highest peak."""
    return _inventories(workload, _pipeline(workload).fullest)


class PipelineStages(NamedTuple):
    """The stages of every rank, and the ranks that can have the highest peak."""

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
        # In a pipeline, a tied head is a copy of the embedding.
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
    """The two ends, and for each distinct set of blocks the first rank, which holds the most micro-batches.

    The first rank is a kind of its own because it receives no activations. So is the bottom of a V, whose two stages
    exchange no messages. With a split backward pass, also the last rank of each kind, which defers the most weight
    gradients.
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
