"""Lower bounds on a rank's memory for a partially decided layout.

Checks the first rank of a pipeline, the second if it has more layers, and the last one if weight gradients are
deferred, since it defers the most (``plan/rank_memory.py``). For what is not decided yet, the most frugal value is
assumed.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import inf

from shoal.facts.bytes_per_parameter import bytes_per_parameter
from shoal.facts.layout import RECOMPUTES, Offload, Recompute, Schedule, Zero, accumulation
from shoal.facts.layout.offload import waiting
from shoal.facts.layout.offload_activations import blocks_away
from shoal.facts.schedules.programs import SPLIT_BACKWARD
from shoal.plan.headroom import NONE, Headroom
from shoal.plan.rank_memory import Blocks, RankMemory, fullest
from shoal.plan.space import (
    ModelSplit,
    PipelineOrder,
    RankWork,
    StateSharding,
    layout_of,
)
from shoal.predict.memory.device import host_share, nvme_share, on_top
from shoal.predict.time.step import stage_kinds


@dataclass
class MemoryBound(RankMemory):
    """``headroom``: memory left free on a device."""

    headroom: Headroom = NONE

    def __post_init__(self) -> None:
        super().__post_init__()
        self.capacity = self.cluster.device.memory_bytes
        self._most = cache(self._allocated)
        self._fewest = cache(self._fewest_blocks)
        self._least: dict[tuple[object, ...], float] = {}
        self._needed: dict[tuple[object, ...], float] = {}
        self._keeping: dict[tuple[object, ...], float] = {}
        self._restings: dict[tuple[object, ...], float] = {}
        self._flying: dict[tuple[object, ...], Blocks] = {}
        self._parted: dict[tuple[object, ...], list[tuple[bool, tuple[PipelineOrder, ...]]]] = {}
        # Off the device: lower bounds on the bytes of a parameter's states and gradient, and of its weight.
        hold = bytes_per_parameter(self.recipe, self.stack)
        self.away_states = (hold.master or hold.weight) + hold.moments
        self.away_gradient = min(hold.compute, hold.gradient)
        self.away_weight = min(self.hold.weight, self.in_shards.weight)
        self.host, self.nvme = host_share(self.cluster), nvme_share(self.cluster)

    def leaving(self, headroom: Headroom) -> MemoryBound:
        """The same with another headroom; cached results do not depend on it."""
        other = copy(self)
        other.headroom = headroom
        other._most = cache(other._allocated)
        return other

    def fits(self, split: ModelSplit, peak: float) -> bool:
        """Whether this peak may fit, with the fewest communicators that this split can have."""
        return peak <= self._most(split)

    def _allocated(self, split: ModelSplit) -> float:
        """The most that a device has room for; overheads scale with it, and a few bytes allow for rounding."""
        layout = layout_of(fsdp=split.data, tp=split.tp, cp=split.cp, pp=split.pp)
        none, much = (on_top(self._workload(layout), size) for size in (0, 2**40))
        free = self.headroom.bytes(self.capacity)
        at_p90 = (self.capacity - free - none.p90) / (much.p90 - none.p90) * 2**40
        if self.headroom.risk < 1 and none.reserved != much.total:  # a CPU's allocator returns freed memory
            at_p90 = min(at_p90, (self.capacity - none.total) * self.headroom.most)
        return at_p90 + 16

    def may_hold(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, offload: tuple[Offload, ...]
    ) -> bool:
        """Whether anything may fit, with states over all ranks."""
        return self.fits(split, self.of_order(split, share, order, offload))

    def holds(self, split: ModelSplit, share: RankWork, order: PipelineOrder, states: StateSharding) -> bool:
        return self.fits(split, self.of_states(split, share, order, states))

    def has_place(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, states: StateSharding
    ) -> bool:
        """Whether a node may have room for offloaded states, in memory and on disk."""
        optimizer, params = (waiting(states.offload, what) for what in ("optimizer", "params"))
        if optimizer is None:
            return True
        # For the rank that has the least; embedding and head are left out.
        sizes = self._sizes(
            split, share.ep, states.fsdp, self._fewest(split.pp, order.schedule, order.chunks)
        )
        host = nvme = 0.0
        elements = optimizer.fraction * sizes.trained_share
        if params is not None and params.nvme and optimizer.nvme:
            nvme += elements * (self.away_states + self.away_gradient)
        elif optimizer.nvme:
            host, nvme = elements * self.away_gradient, elements * self.away_states
        else:
            host += elements * (self.away_states + self.away_gradient)
        if params is not None:
            weights = params.fraction * self.away_weight * sizes.trained_share
            host, nvme = (host, nvme + weights) if params.nvme else (host + weights, nvme)
        return host <= self.host and nvme <= self.nvme

    def _fewest_blocks(self, pp: int, schedule: Schedule, chunks: int) -> Blocks:
        """The fewest blocks of each kind on any rank."""
        kinds = stage_kinds(self.model, pp, chunks, schedule, self.cut_by)
        return Blocks(min(kind.dense for kind in kinds), min(kind.sparse for kind in kinds))

    def of_split(self, split: ModelSplit, ep: int, offload: tuple[Offload, ...]) -> tuple[float, float]:
        """For a pipeline's average rank with maximal sharding: bytes at rest, and at the update."""
        dense, sparse = self._layers
        sizes = self._sizes(split, ep, split.data, Blocks(dense, sparse))
        whole = self._whole_experts(split, ep, split.data, sparse)
        weight, optimizer, gradient = self._resting(
            sizes, whole, sharded=True, scattered=True, offload=offload, piped=split.pp > 1
        )
        return (weight + optimizer) / split.pp, (weight + optimizer + gradient) / split.pp

    def of_share(self, split: ModelSplit, share: RankWork, resting: float) -> float:
        """The backward pass of one block, added to what is at rest.

        Its own activations are on the device even if others are offloaded. It grows with the micro-batch: if one is
        too large, so are all larger ones.
        """
        key = split.tp, split.cp, share.sp, share.cp_kind, split.pp > 1, share.ep > 1
        least = self._least.get(key)
        if least is None:
            least = inf
            # The schedule is still open, and with it whether blocks are compiled.
            ways = {self._compiled(split.pp, schedule, share.ep) for schedule in ("1f1b", "zb")}
            for recompute, compiled in product(RECOMPUTES, ways):
                kinds = [
                    self._block(split, share, recompute, experts, compiled)
                    for experts, count in zip((False, True), self._layers, strict=True)
                    if count
                ]
                least = min(least, min(one.resting for one in kinds) + min(one.working for one in kinds))
            self._least[key] = least
        return resting + max(0.0, share.micro * least)

    def of_orders(
        self,
        split: ModelSplit,
        share: RankWork,
        orders: list[PipelineOrder],
        offload: tuple[Offload, ...],
    ) -> float:
        """For any of these orders, which recompute the same: bytes at rest on a rank, plus saved activations."""
        recompute = orders[0].recompute
        key = split, share, recompute, orders[0].schedule, len(orders), offload
        known = self._needed.get(key)
        if known is None:
            known = self._needed[key] = self._of_any(split, share, orders, recompute, offload)
        return known

    def _of_any(
        self,
        split: ModelSplit,
        share: RankWork,
        orders: list[PipelineOrder],
        recompute: Recompute,
        offload: tuple[Offload, ...],
    ) -> float:
        sent = waiting(offload, "activations")
        kept = self.kept_by_any(split, share, orders, sent.fraction if sent else 0.0)
        resting_key = split, share.ep, orders[0].schedule, len(orders), offload
        resting = self._restings.get(resting_key)
        if resting is None:
            resting = self._restings[resting_key] = self._resting_by_any(split, share, orders, offload)
        return resting + kept

    def kept_by_any(
        self, split: ModelSplit, share: RankWork, orders: list[PipelineOrder], sent: float = 0.0
    ) -> float:
        """The least activation memory of any of these orders; ``sent`` of it is offloaded."""
        key = split, share, orders[0], len(orders), sent
        kept = self._keeping.get(key)
        if kept is None:
            kept = self._keeping[key] = self._least_kept(split, share, orders, sent)
        return kept

    def _least_kept(
        self, split: ModelSplit, share: RankWork, orders: list[PipelineOrder], sent: float
    ) -> float:
        recompute = orders[0].recompute
        # With more micro-batches no pipeline holds fewer.
        times = min(accumulation(self.recipe.batch, split.data, share.micro), 2 * split.pp)
        kept = inf
        for compiled, alike in self._by_compilation(split.pp, share.ep, orders):
            flying = self._fewest_flying(alike, split.pp, times, sent)
            size, working = 0.0, inf
            for experts, layers, count in zip((False, True), self._layers, flying, strict=False):
                if layers:
                    one = self._block(split, share, recompute, experts, compiled)
                    size += count * one.resting
                    working = min(working, one.working)
            tokens = self.recipe.seq // split.cp
            if any(order.schedule in SPLIT_BACKWARD for order in alike):
                working -= self._not_kept(recompute, tokens)
            kept = min(kept, share.micro * (size + max(0.0, working)))
        return kept

    def _resting_by_any(
        self,
        split: ModelSplit,
        share: RankWork,
        orders: list[PipelineOrder],
        offload: tuple[Offload, ...],
    ) -> float:
        """A rank's smallest share of common parameters, without routed experts."""
        least = [self._fewest(split.pp, order.schedule, order.chunks) for order in orders]
        blocks = Blocks(min(one.dense for one in least), min(one.sparse for one in least))
        sizes = self._sizes(split, share.ep, split.data, blocks)
        whole = self._whole_experts(split, share.ep, split.data, self._layers[1])
        weight, optimizer, _ = self._resting(
            sizes, whole, sharded=True, scattered=True, offload=offload, piped=split.pp > 1
        )
        during = 0.0
        if split.pp > 1 and split.data * split.cp > 1:
            during = min(
                self._during(split, sizes, whole, way.zero == 3, way, False)
                for way in self.frugal(split, offload)
            )
        return max(0.0, weight) + optimizer + max(0.0, during)

    def _fewest_flying(self, orders: tuple[PipelineOrder, ...], pp: int, times: int, sent: float) -> Blocks:
        """A lower bound on the blocks of each kind held over all micro-batches by the fullest rank."""
        key = orders[0], len(orders), pp, times, sent
        known = self._flying.get(key)
        if known is None:
            kept = [self._flying_in(order, pp, times, sent) for order in orders]
            known = self._flying[key] = Blocks(
                min(one.dense for one in kept), min(one.sparse for one in kept)
            )
        return known

    def _by_compilation(
        self, pp: int, ep: int, orders: list[PipelineOrder]
    ) -> list[tuple[bool, tuple[PipelineOrder, ...]]]:
        """Orders whose blocks are compiled, and the others."""
        key = pp, ep > 1, orders[0], len(orders)
        known = self._parted.get(key)
        if known is None:
            parts: dict[bool, list[PipelineOrder]] = {}
            for order in orders:
                parts.setdefault(self._compiled(pp, order.schedule, ep), []).append(order)
            known = self._parted[key] = [(compiled, tuple(alike)) for compiled, alike in parts.items()]
        return known

    def _flying_in(self, order: PipelineOrder, pp: int, times: int, sent: float) -> Blocks:
        most = Blocks(0, 0)
        for rank in self._looked_at(pp, order.schedule, order.chunks):
            chunks = self._chunks_of(pp, order, rank)
            away = [
                len(blocks_away(one.dense + one.sparse, sent, one.first, one.last)) if sent else 0
                for one in chunks
            ]
            for held, _, _ in fullest(order, pp, times, rank):
                stay = list(zip(chunks, away, held, strict=True))
                found = Blocks(
                    sum(count * max(0, one.dense - gone) for one, gone, count in stay),
                    sum(count * max(0, one.sparse - gone) for one, gone, count in stay),
                )
                # Both counts from the same moment: which of two moments is larger depends on what blocks save.
                most = found if found.dense + found.sparse > most.dense + most.sparse else most
        return most

    def frugal(self, split: ModelSplit, offload: tuple[Offload, ...]) -> list[StateSharding]:
        """Sharding over all ranks needs the least memory, whichever states are sharded."""
        zeros: tuple[Zero, ...] = (3, 2, 1) if split.data * split.cp > 1 else (3,)
        return [StateSharding(1, split.data, zero, offload) for zero in zeros]

    def of_order(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, offload: tuple[Offload, ...]
    ) -> float:
        key = split, share, order, offload
        known = self._needed.get(key)
        if known is None:
            known = self._needed[key] = self._of_ranks(split, share, order, self.frugal(split, offload))
        return known

    def of_states(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, states: StateSharding
    ) -> float:
        key = split, share, order, states
        known = self._needed.get(key)
        if known is None:
            known = self._needed[key] = self._of_ranks(split, share, order, [states])
        return known

    def _of_ranks(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, ways: list[StateSharding]
    ) -> float:
        ranks = self._looked_at(split.pp, order.schedule, order.chunks)
        return max(self._of_rank(split, share, order, ways, rank) for rank in ranks)
