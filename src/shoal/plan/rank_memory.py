"""Lower bounds on one rank's memory for a decided order: in the backward pass of the last block, and at the update.

Only the parts of a ledger that are cheap to compute count: states, saved activations, gathered or cast weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import mul
from typing import NamedTuple

from shoal.facts.bytes_per_parameter import bytes_per_parameter
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.stack import Stack
from shoal.facts.config import Lora
from shoal.facts.layout import V_SHAPED, Layout, Offload, Recompute, Schedule, accumulation
from shoal.facts.layout.float8 import gathered_width
from shoal.facts.layout.offload import waiting
from shoal.facts.layout.offload_activations import blocks_away
from shoal.facts.layout.parameter_groups import placement
from shoal.facts.model import Model
from shoal.facts.nf4 import WIDTH
from shoal.facts.recipe import Recipe
from shoal.facts.schedules.programs import SPLIT_BACKWARD
from shoal.plan.space import (
    ModelSplit,
    PipelineOrder,
    RankWork,
    StateSharding,
    layout_of,
    one_sequence,
    placed,
)
from shoal.predict.memory.micro_batch import micro_batch_bytes
from shoal.predict.memory.peaks import BATCH_BYTES
from shoal.predict.rank_parameters import (
    ParameterCount,
    ShardDegrees,
    block_count,
    end_counts,
    expert_elements,
    stages_here,
    total,
)
from shoal.predict.workload import Workload


class Blocks(NamedTuple):
    """Blocks of a rank, or of one of its chunks."""

    dense: int
    sparse: int
    first: bool = False  # the network's first
    last: bool = False


class KeptByBlock(NamedTuple):
    """Bytes of one block and one sequence."""

    resting: float
    deferred: float  # once only weight gradients remain to be computed
    working: float  # peak of its backward pass, beyond what is saved


class KeptActivations(NamedTuple):
    """Bytes of activations at the peak before there are gradients, and with gradients."""

    before: float
    later: float


@dataclass
class RankMemory:
    """Memory bounds for one model on one kind of device."""

    model: Model
    cluster: Cluster
    recipe: Recipe
    stack: Stack
    lora: Lora | None
    compile: bool | None = None

    def __post_init__(self) -> None:
        # A single device may process the whole batch in one pass.
        alone = self.cluster.nodes * self.cluster.devices_per_node == 1
        self.hold = bytes_per_parameter(self.recipe, self.stack, one_pass=alone)
        self.in_shards = bytes_per_parameter(self.recipe, self.stack, sharded=True)
        self.cut_by = None if self.stack.even_stages else self.recipe.seq
        # Cached by what each result depends on, instead of by the model, which is slow to hash.
        self._compiled = cache(self._compiles)
        self._part = cache(self._block_count)
        self._activations = cache(self._counted)
        self._chunks_of = cache(self._cut)
        self._looked_at = cache(self._likely_fullest)
        self._blocks: dict[tuple[object, ...], KeptByBlock] = {}
        self._sized: dict[tuple[object, ...], ParameterCount] = {}

    def _of_rank(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, ways: list[StateSharding], rank: int
    ) -> float:
        """With the most frugal of several shardings, part by part; they differ only in ``zero``."""
        shards, offload = placed(split, ways[0]).sharded.size, ways[0].offload
        sizes = self._on_rank(split, share, order, ways[0].fsdp, rank)
        sparse = sum(chunk.sparse for chunk in self._chunks_of(split.pp, order, rank))
        whole = self._whole_experts(split, share.ep, ways[0].fsdp, sparse)
        any_sharded = any_scattered = False
        before = later = float("inf")
        for states in ways:
            sharded = shards > 1 and (states.zero == 3 or self.stack.unsharded != "buckets")
            any_sharded = any_sharded or sharded
            any_scattered = any_scattered or sharded or (shards > 1 and states.zero == 2)
            there = whole
            if sharded and split.pp > 1 and len(ways) > 1:
                # Sharded over fewer ranks, experts may be unsharded: then they are stored as narrow as they are used,
                # with no other copy.
                routed = sparse * expert_elements(self.model, split.tp, share.ep) if share.ep > 1 else 0
                ranks = placement(split.tp, split.cp, ways[0].fsdp, 1, share.ep).sharded.size
                in_shards = self.in_shards.weight / self.hold.compute * routed / ranks
                there = max(whole, min(routed, round(in_shards)))
            before = min(before, self._during(split, sizes, there, sharded, states, False))
            later = min(later, self._during(split, sizes, there, sharded, states, True))
        weight, optimizer, gradient = self._resting(
            sizes, whole, any_sharded, any_scattered, offload, split.pp > 1
        )
        kept = self._kept(split, share, order, offload, not any_sharded, rank)
        # The last backward pass runs with all gradients present, however little else is left.
        once = accumulation(self.recipe.batch, split.data, share.micro) == 1
        full = max(gradient, kept.before + before, before if once else later)
        if kept.later:
            full = max(full, kept.later + later)
        return weight + optimizer + full

    def _during(
        self,
        split: ModelSplit,
        sizes: ParameterCount,
        whole: int,
        sharded: bool,
        states: StateSharding,
        begun: bool,
    ) -> float:
        """Gradients and gathered weights in the backward pass.

        ``whole``: unsharded experts, which are not gathered; before the first pass their gradients may not exist.
        """
        hold = self.hold
        late = 0 if begun else hold.gradient * whole
        if sharded and split.pp > 1:
            gathered = gathered_width(self.recipe) * (sizes.whole - whole)
            return gathered + (hold.reduce * sizes.trained if begun else 0.0)
        if split.pp == 1 and waiting(states.offload, "optimizer"):
            return 0.0  # gradients are with the states
        if sharded:
            # With replicas, gradients accumulate in the precision of their reduction.
            width = min(hold.gradient, hold.reduce) if states.dp > 1 else hold.gradient
            return width * sizes.trained_share if begun else 0.0
        if placed(split, states).sharded.size > 1:
            if states.zero == 2 and split.pp == 1:
                return hold.gradient * sizes.trained_share - late
            return hold.gradient * sizes.trained - late
        return hold.gradient * sizes.trained - late if states.dp > 1 or begun else 0.0

    def _whole_experts(self, split: ModelSplit, ep: int, fsdp: int, sparse: int) -> int:
        """Unsharded experts of a rank, in ``sparse`` layers: those that no other rank of a replica holds."""
        if not sparse:
            return 0
        routed = placement(split.tp, split.cp, fsdp, split.data // fsdp, ep)
        return sparse * expert_elements(self.model, split.tp, ep) if routed.sharded.size == 1 else 0

    def _resting(
        self,
        sizes: ParameterCount,
        whole: int,
        sharded: bool,
        scattered: bool,
        offload: tuple[Offload, ...],
        piped: bool,
    ) -> tuple[float, float, float]:
        """Bytes of weights, of optimizer states, and of gradients at the update.

        Partly offloaded states count as 0, because how much of them stays depends on the exact cut.
        """
        updated_away = waiting(offload, "optimizer") is not None
        hold = self.in_shards if sharded and not updated_away else self.hold
        each = hold.weight if self.lora is None else hold.frozen if self.lora.base != "nf4" else float(WIDTH)
        weight = each * (sizes.share if sharded else sizes.whole)
        if waiting(offload, "params"):
            weight = 0.0
        elif sharded:
            # Unsharded experts are stored as without sharding; their extra master weights are left out.
            weight -= max(0.0, hold.weight - self.hold.weight) * whole
        if updated_away and (scattered or not piped):
            return weight, 0.0, 0.0
        optimizer = 0.0 if updated_away else (hold.moments + hold.master) * sizes.trained_share
        return weight, optimizer, hold.gradient * (sizes.trained_share if scattered else sizes.trained)

    def _on_rank(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, fsdp: int, rank: int
    ) -> ParameterCount:
        key = split.tp, split.cp, split.pp, share.ep, order.schedule, order.chunks, fsdp, rank
        known = self._sized.get(key)
        if known is None:
            chunks = self._chunks_of(split.pp, order, rank)
            blocks = Blocks(sum(chunk.dense for chunk in chunks), sum(chunk.sparse for chunk in chunks))
            last = rank == (0 if order.schedule in V_SHAPED else split.pp - 1)
            head = last and not (self.model.tied and split.pp == 1)
            known = self._sized[key] = self._sizes(split, share.ep, fsdp, blocks, rank == 0, head)
        return known

    def _sizes(
        self,
        split: ModelSplit,
        ep: int,
        fsdp: int,
        blocks: Blocks,
        embedding: bool = False,
        head: bool = False,
    ) -> ParameterCount:
        dense, routed = (placement(split.tp, split.cp, fsdp, split.data // fsdp, each) for each in (1, ep))
        key = ShardDegrees(split.tp, ep, dense.sharded.size, routed.sharded.size)
        blocks_here = ((False, blocks.dense), (True, blocks.sparse))
        counts = [self._part(experts, key).times(count) for experts, count in blocks_here if count]
        ends = end_counts(self.model, key)
        counts += [ends.embedding] * embedding + [ends.head] * head
        found = total(counts)
        # Adapters are negligible.
        return found if self.lora is None else found._replace(trained=0, trained_share=0)

    def _block_count(self, experts: bool, split: ShardDegrees) -> ParameterCount:
        return block_count(self.model, experts, split, None)

    def _kept(
        self,
        split: ModelSplit,
        share: RankWork,
        order: PipelineOrder,
        offload: tuple[Offload, ...],
        cast: bool,
        rank: int,
    ) -> KeptActivations:
        """Activations in the backward pass of the last block, plus weights that autograd saves as casts."""
        sent = waiting(offload, "activations")
        cast = cast and self.hold.cast and self.lora is None and order.recompute == "none"
        return self._activations(split, share, order, sent.fraction if sent else 0.0, cast, rank)

    def _counted(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, sent: float, cast: bool, rank: int
    ) -> KeptActivations:
        chunks = self._chunks_of(split.pp, order, rank)
        times = accumulation(self.recipe.batch, split.data, share.micro)
        part = ShardDegrees(split.tp, share.ep, 1, 1)
        each, put_off, largest, working = [], [], 0.0, float("inf")
        compiled = self._compiled(split.pp, order.schedule, share.ep)
        cast = cast and not compiled
        for blocks in chunks:
            held = late = 0.0
            away = (
                len(blocks_away(blocks.dense + blocks.sparse, sent, blocks.first, blocks.last)) if sent else 0
            )
            for experts, count in ((False, blocks.dense), (True, blocks.sparse)):
                if not count:
                    continue
                one = self._block(split, share, order.recompute, experts, compiled)
                # Which kind of block stays is ignored.
                held += max(0, count - away) * share.micro * one.resting
                late += count * share.micro * one.deferred
                working = min(working, share.micro * one.working)
                if cast:
                    size = self.hold.compute * self._part(experts, part).whole
                    held, largest = held + count * size, max(largest, size)
            each.append(held)
            put_off.append(late)
        tokens = share.micro * self.recipe.seq // split.cp
        if split.pp > 1:
            # A stage keeps what it sends on; the last stage sends nothing.
            stream = (tokens / split.tp if share.sp else tokens) * self.model.hidden * self.hold.compute
            each = [held + stream for held in each]
            if order.schedule in V_SHAPED or rank == split.pp - 1:
                each[-1] -= stream
        if order.schedule in SPLIT_BACKWARD:
            working -= self._not_kept(order.recompute, tokens)
        fixed = BATCH_BYTES * tokens * times + max(0.0, working)
        most = [fixed, 0.0]
        for held_of, put_off_of, begun in fullest(order, split.pp, times, rank):
            flying = sum(map(mul, each, held_of)) + sum(map(mul, put_off, put_off_of)) - largest
            most[begun] = max(most[begun], fixed + max(0.0, flying))
        return KeptActivations(*most)

    def _not_kept(self, recompute: Recompute, tokens: int) -> float:
        """With deferred weight gradients: the last product of a block, which nothing reads again."""
        return self.hold.compute * self.model.hidden * tokens if recompute == "selective" else 0.0

    def _compiles(self, pp: int, schedule: Schedule, ep: int) -> bool:
        return self._workload(layout_of(pp=pp, schedule=schedule, ep=ep)).compiled

    def _workload(self, layout: Layout) -> Workload:
        return Workload(
            self.model,
            self.cluster,
            self.recipe,
            layout,
            self.stack,
            lora=self.lora,
            compile=self.compile,
        )

    def _block(
        self, split: ModelSplit, share: RankWork, recompute: Recompute, experts: bool, compiled: bool
    ) -> KeptByBlock:
        """For one sequence; everything scales with the micro-batch."""
        key = split.tp, split.cp, share.sp, share.cp_kind, share.ep > 1, recompute, experts, compiled
        known = self._blocks.get(key)
        if known is None:
            workload = replace(self._workload(one_sequence(split, share, recompute)), compile=compiled)
            alike = [
                one for kind, one in micro_batch_bytes(workload).blocks.items() if kind.experts == experts
            ]
            known = self._blocks[key] = KeptByBlock(
                min(one.resting for one in alike),
                min(one.deferred for one in alike),
                min(one.fullest for one in alike),
            )
        return known

    def _cut(self, pp: int, order: PipelineOrder, rank: int) -> tuple[Blocks, ...]:
        """The chunks of a rank."""
        stages = stages_here(self.model, pp, order.chunks, order.schedule, self.cut_by, rank)
        sparse = [sum(self.model.has_experts(number) for number in stage.layers) for stage in stages]
        return tuple(
            Blocks(len(stage.layers) - routed, routed, stage.first, stage.last)
            for stage, routed in zip(stages, sparse, strict=True)
        )

    def _likely_fullest(self, pp: int, schedule: Schedule, chunks: int) -> tuple[int, ...]:
        """The first rank; the second, if it has more layers, as it has no embedding; and, with deferred weight
        gradients, the last one.
        """
        order = PipelineOrder(schedule, chunks, "none")
        ranks = [0]
        if pp > 2 and schedule not in V_SHAPED:
            first, second = (
                sum(one.dense + one.sparse for one in self._chunks_of(pp, order, rank)) for rank in (0, 1)
            )
            ranks += [1] if second > first else []
        return (*ranks, pp - 1) if pp > 1 and schedule in SPLIT_BACKWARD else tuple(ranks)

    @cached_property
    def _layers(self) -> tuple[int, int]:
        """Layers without experts and with experts."""
        sparse = sum(self.model.has_experts(number) for number in range(self.model.layers))
        return self.model.layers - sparse, sparse


def fullest(
    order: PipelineOrder, pp: int, times: int, rank: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], bool]]:
    """Moments of the first, second or last rank: for each chunk, the micro-batches whose activations are saved, and
    those with only weight gradients left; and whether an earlier backward pass has left gradients.

    At one of its moments a schedule holds at least as much (``predict/memory/in_flight.py`` simulates them exactly).
    """
    chunks = order.chunks
    none, reached = (0,) * chunks, min(times, pp)
    if pp == 1:
        yield (1,), none, times > 1
    elif order.schedule == "gpipe":
        yield (times,), none, False
    elif rank == 0 and order.schedule in V_SHAPED:
        yield (min(times, 2 * pp - 1), 1), none, times >= 2 * pp
    elif rank == 0 or (rank == 1 and pp > 2 and order.schedule not in V_SHAPED):
        if order.schedule == "interleaved":
            held = (min(times, 2 * pp - 1 - 2 * rank), *(reached,) * (chunks - 1))
        else:  # the last chunk has not seen all of these when the first of them returns
            held = (*(reached,) * (chunks - 1), min(times, pp - rank))
        yield held, none, times >= 2 * pp
    elif order.schedule == "zb":
        # Weight gradients are deferred until as many are waiting; with several chunks, for a whole round.
        begun = times > pp if chunks == 1 else times >= 2 * pp
        yield (*(reached,) * (chunks - 1), 1), (*none[1:], reached - 1), begun
    else:
        yield (reached, reached), none, times > pp
        if order.schedule == "zbv" and times >= 2 * pp:
            yield (1, 0), (rank, rank), True
