"""Lower bounds on step time once a pipeline's order is known, and then its state sharding.

For orders, data ranks' exchange is left out; for states, the latency of their many calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from shoal.facts.layout import Offload, Recompute, Zero, accumulation
from shoal.facts.layout.offload import waiting
from shoal.facts.precision import compute_width
from shoal.plan.exchange_bound import ZEROS, ExchangeBound
from shoal.plan.share_bound import ShareBound
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
from shoal.predict.rank_parameters import (
    rank_parameters,
    trained_with_experts,
)
from shoal.predict.time import host, layer
from shoal.predict.time.bubble import idle
from shoal.predict.time.layer import Passes, Seconds, WeightTraffic
from shoal.predict.time.offload import SLOWED, Offloadable, OverlappableCompute, Shares, transfer
from shoal.predict.time.step import (
    resting_bytes,
    update_seconds,
)
from shoal.predict.workload import Workload

NO_END = Seconds(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass
class TimeBound(ShareBound):
    """Step-time bounds for one model on one cluster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offloading = cache(self._with_offload)
        self._hosts = cache(self._host_of_layer)
        self._first: dict[tuple[object, ...], tuple[float, float, int]] = {}
        self._resting: dict[tuple[object, ...], float] = {}
        self._updated: dict[tuple[object, ...], float] = {}
        self.exchange = ExchangeBound(self.on, self.body, bool(self.tune.persist_below), self.frozen)
        self._exchanged: dict[tuple[object, ...], float] = {}

    def of_order(
        self,
        split: ModelSplit,
        share: RankWork,
        order: PipelineOrder,
        held: WeightTraffic | None = None,
    ) -> float:
        """The slowest rank's work, and how long it waits for the others.

        ``held``: weight traffic per micro-batch, once the states determine it.
        """
        held = held or self.least_held(split, share)
        costs = self.costs(split, share, order.recompute, held, self.compiled(split, order))
        hosts = self._hosts(order.recompute, self.compiled(split, order))
        total = slowest = 0.0
        computed = inf
        for kind in self.kinds(split.pp, order.chunks, order.schedule):
            dense, sparse, first, last, ranks, _ = kind
            ends = costs.ends(kind) if first or last else 0.0
            seconds = dense * costs.dense + sparse * costs.sparse + ends
            seconds = max(seconds, hosts * (dense + sparse))
            total += ranks * seconds
            slowest = max(slowest, seconds)
            # The slowest rank's devices compute at least this long, whichever rank it is.
            computed = min(computed, dense * costs.dense_computed + sparse * costs.sparse_computed + ends)
        times = accumulation(self.recipe.batch, split.data, share.micro)
        always = times * self.behind * computed + self.once
        if split.pp == 1:
            return times * slowest + always
        idle_time = idle(order.schedule, split.pp, order.chunks, times)
        wait = idle_time.work / (split.pp - 1)
        # If a rank's own work counts less than its waiting, the bound assumes all work on one rank.
        worked = times * slowest + wait * (total - slowest) if times >= wait else times * total
        tokens = share.micro * self.recipe.seq // split.cp
        if split.tp > 1 and (share.sp or self.stack.parts_messages):
            tokens //= split.tp
        size = tokens * self.model.hidden * compute_width(self.recipe)
        message = self.on.links.seconds("send", size, split.pp, self.devices // split.pp)
        return worked + idle_time.messages * message + always

    def of_offload(
        self,
        split: ModelSplit,
        share: RankWork,
        order: PipelineOrder,
        offload: tuple[Offload, ...],
        worked: float,
    ) -> float:
        """With maximal sharding, so that the least is transferred: in every pass, or once."""
        # For an update on the device, shards of gathered weights take no longer than others.
        zeros: tuple[Zero, ...] = (3, 1) if waiting(offload, "optimizer") else (3,)
        return worked + min(self.of_update(split, share, order, zero, offload) for zero in zeros)

    def of_update(
        self,
        split: ModelSplit,
        share: RankWork,
        order: PipelineOrder,
        zero: Zero,
        offload: tuple[Offload, ...],
    ) -> float:
        """The update and its transfers, with maximal sharding."""
        key = split, share, order, zero < 3, offload
        known = self._updated.get(key)
        if known is None:
            states = StateSharding(1, split.data, zero, offload)
            known = self._updated[key] = self._update(split, share, order, states)
        return known

    def of_sending(self, split: ModelSplit, share: RankWork, orders: Sequence[PipelineOrder]) -> float:
        """Time added by offloaded activations: their slowdown of overlapping computation."""
        recompute, compiled = orders[0].recompute, self.compiled(split, orders[0])
        times = accumulation(self.recipe.batch, split.data, share.micro)
        layers = sum(self._ways(split.pp, orders).fewest)
        kept = layers * share.micro * self._kept(split, share, recompute, compiled)
        return (2 * times - 1) * SLOWED * kept / self.on.node.link

    def of_states(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, states: StateSharding, worked: float
    ) -> float:
        """``worked``: ``of_order``, plus the weights that these states move."""
        times = accumulation(self.recipe.batch, split.data, share.micro)
        held = self.handled(split, share, states)
        costs = self.costs(split, share, order.recompute, held, self.compiled(split, order))
        kinds = self.kinds(split.pp, order.chunks, order.schedule)
        layers = max(kind.dense + kind.sparse for kind in kinds)
        beside = layers * costs.forward, layers * costs.backward
        exchange = self.exchange.of_states(split, share, kinds, states, times)
        left = exchange.left(self.stack.overlap, times, *beside)
        return worked + left + self._update(split, share, order, states)

    def of_exchange(
        self,
        split: ModelSplit,
        share: RankWork,
        orders: Sequence[PipelineOrder],
        zeros: tuple[Zero, ...] = ZEROS,
        compiled: bool | None = None,
    ) -> float:
        """Exposed data-rank exchange for any sharding and recomputation, on top of ``of_share`` and ``of_order``."""
        key = split, share, zeros, compiled
        known = self._exchanged.get(key)
        if known is None:
            ways = self._ways(split.pp, orders)
            times = accumulation(self.recipe.batch, split.data, share.micro)
            forward, backward = self._longest_passes(split, share, times, compiled)
            layers, fewest = ways.most, ways.fewest
            known = self._exchanged[key] = self.exchange.least(
                split, share, zeros, fewest, times, layers * forward, layers * backward
            )
        return known

    def _longest_passes(
        self, split: ModelSplit, share: RankWork, times: int, compiled: bool | None
    ) -> tuple[float, float]:
        """Per layer, with recomputation."""
        found = [self.on.handling(rests, times) for rests in layer.RESTS]
        most = Passes(*map(max, zip(*found, strict=True)))
        held = WeightTraffic(most, most)
        within = held if self.measured else layer.FREE
        ways = (compiled,) if compiled is not None else {self.compiled(split, None), False}
        passes = [self.on.layer(part) for way in ways for part in self._parts(split, share, within, way)]
        forward = max(one.forward for one in passes)
        backward = max(one.backward + max(one.full, one.again) for one in passes)
        if not self.measured:
            *layers, _ = self.moving(split.tp, share.ep, held)
            ahead, back = (max(way) for way in zip(*layers, strict=True))
            forward, backward = forward + ahead, backward + ahead + back
        return forward, backward

    def _host_of_layer(self, recompute: Recompute, compiled: bool) -> float:
        return sum(host.of_layer(self.on, recompute, compiled))

    def _update(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder, states: StateSharding
    ) -> float:
        """The optimizer on the device; with offload, its transfers as well."""
        elements, resting, layers = self._on_first_rank(split, share, order)
        shards = placed(split, states).sharded.size
        owned = elements / shards
        seconds = update_seconds(self.on, owned, states.zero < 3)
        if not states.offload:
            return seconds
        workload = self._offloading(split, share.micro, states)
        kept = layers * share.micro * self._kept(split, share, order.recompute, self.compiled(split, order))
        # A longer step hides more of the transfers: an upper bound on its passes.
        held = self.handled(split, share, states)
        costs = self.costs(split, share, order.recompute, held, self.compiled(split, order))
        forward = backward = blocks = 0.0
        for kind in self.kinds(split.pp, order.chunks, order.schedule):
            here = kind.dense + kind.sparse
            first, last = costs.first if kind.first else NO_END, costs.last if kind.last else NO_END
            blocks = max(blocks, here * costs.forward)
            forward = max(forward, here * costs.forward + first.forward + last.forward)
            backward = max(backward, here * costs.backward + first.input + last.input)
        beside = OverlappableCompute(forward, backward, blocks)
        # Cuts between tensors offload at least the fraction; the last piece to arrive is ignored.
        parts = (waiting(states.offload, what) for what in Shares._fields)
        away = Shares(*(part.fraction if part else 0.0 for part in parts))
        weights = resting / shards if states.zero == 3 else resting
        has = Offloadable(owned, 0.0, weights, kept, layers)
        moved = transfer(workload, self.on.node, beside, has, away, seconds)
        return moved.seconds + moved.stays * seconds

    def _kept(self, split: ModelSplit, share: RankWork, recompute: Recompute, compiled: bool) -> float:
        """Bytes that one layer saves per sequence, for the kind that saves the least."""
        key = split.tp, split.cp, share.sp, share.cp_kind, share.ep > 1, recompute, compiled
        known = self._resting.get(key)
        if known is None:
            workload = replace(self._workload(one_sequence(split, share, recompute)), compile=compiled)
            blocks = micro_batch_bytes(workload).blocks.values()
            known = self._resting[key] = min(block.resting for block in blocks)
        return known

    def _with_offload(self, split: ModelSplit, micro: int, states: StateSharding) -> Workload:
        """A workload with everything that transfers depend on: the precision and frequency of gradient transfers."""
        dp, fsdp, zero, offload = states
        return self._workload(
            layout_of(dp=dp, fsdp=fsdp, zero=zero, cp=split.cp, pp=split.pp, micro=micro, offload=offload)
        )

    def _on_first_rank(
        self, split: ModelSplit, share: RankWork, order: PipelineOrder
    ) -> tuple[float, float, int]:
        """On the pipeline's first rank, unsharded: trained parameters; bytes of all parameters; its layers."""
        key = split.tp, share.sp, split.pp, order.schedule, order.chunks, share.ep
        known = self._first.get(key)
        if known is None:
            layout = layout_of(
                tp=split.tp,
                sp=share.sp,
                pp=split.pp,
                schedule=order.schedule,
                chunks=order.chunks,
                ep=share.ep,
            )
            here = rank_parameters(layout, self.model, self.cut_by, 0)
            workload = self._workload(layout)
            elements = float(trained_with_experts(workload, here))
            known = self._first[key] = elements, resting_bytes(workload, here, 1), here.layers
        return known
