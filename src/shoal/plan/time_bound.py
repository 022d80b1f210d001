"""Lower bounds on step time for a partially decided layout.

Bounds are composed of a layer's costs, which are priced once. Each leaves out what is not decided yet, and what takes
long to say: of a split its latencies and everything but matrix products and tensor ranks' exchange; of shares the idle
pipeline; of orders what data ranks exchange; of states the latency of their many calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf
from typing import NamedTuple

from shoal.facts.config import Lora, TuneSection
from shoal.facts.layout import Layout, Offload, Recompute, Schedule, Zero, accumulation
from shoal.facts.layout.float8 import gathered_width
from shoal.facts.layout.offload import waiting
from shoal.facts.layout.parameter_groups import Placement
from shoal.facts.precision import compute_width, reduce_width, weight_width
from shoal.plan.space import (
    UNITS,
    ModelSplit,
    PipelineOrder,
    StateSharding,
    WorkShare,
    layout_of,
    one_sequence,
    placed,
)
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.flops import matrix_parameters
from shoal.predict.memory.micro_batch import micro_batch_bytes
from shoal.predict.rank_parameters import (
    RankParameters,
    expert_elements,
    rank_parameters,
    trained_with_experts,
)
from shoal.predict.time import context, host, layer
from shoal.predict.time import expert as experts
from shoal.predict.time.bubble import Idle, follows, idle
from shoal.predict.time.layer import Passes, Seconds
from shoal.predict.time.offload import Beside, Offloadable, Shares, transfer
from shoal.predict.time.step import (
    ALWAYS,
    CostModel,
    RankKind,
    beside_products,
    resting_bytes,
    stage_kinds,
    update_seconds,
    within_pass,
)
from shoal.predict.traffic import expert, tensor
from shoal.predict.workload import Workload

NO_END = Seconds(0.0, 0.0, 0.0, 0.0, 0.0)


class Exchange(NamedTuple):
    """Seconds that data ranks exchange in a step, by what they do it beside."""

    forward: float = 0.0  # for every micro-batch, beside its passes
    backward: float = 0.0
    bare_forward: float = 0.0  # of these, what has nothing to hide behind: a block's, of each micro-batch
    bare_backward: float = 0.0
    once_forward: float = 0.0  # once, beside one micro-batch's passes
    once_backward: float = 0.0
    alone: float = 0.0


class Costs(NamedTuple):
    """Seconds of one micro-batch, on a rank's share of it."""

    dense: float  # a layer, there and back, with what it repeats and what it exchanges within
    sparse: float  # and a layer with experts
    first: Seconds  # the embedding
    last: Seconds  # the head and the loss
    dense_computed: float  # the same layers without exchange
    sparse_computed: float
    forward: float  # the slower kind of layer, without exchange
    backward: float

    def ends(self, kind: RankKind) -> float:
        """Of the embedding and the head, what a rank has; weight gradients are counted with their inputs'."""
        first, last = self.first, self.last
        return (first.forward + first.input if kind.first else 0.0) + (
            last.forward + last.input if kind.last else 0.0
        )


@dataclass
class TimeBound:
    """Of one model on one cluster."""

    on: CostModel
    tune: TuneSection
    lora: Lora | None
    devices: int
    compile: bool | None = None

    def __post_init__(self) -> None:
        self.model, self.recipe, self.stack = self.on.model, self.on.recipe, self.on.stack
        # By what each depends on, and not by the model, whose hash takes a while.
        self.kinds = cache(self._stage_kinds)
        self._body = cache(self._all_layers)
        self._compiles = cache(self._compiled_blocks)
        self._offloading = cache(self._with_offload)
        self._hosts = cache(self._host_of_layer)
        # Frozen weights have no gradients; where some are, that of the others is left out.
        self.frozen = self.lora is not None or self.recipe.freezes
        # A step waits for the slowest of all devices, and once for the host.
        self.behind = host.slowest(self.devices, self.on.rates.device.spread)
        self.once = host.at_least_once(self.on)
        self.cut_by = None if self.stack.even_stages else self.recipe.seq
        self._costs: dict[tuple[object, ...], Costs] = {}
        self._first: dict[tuple[object, ...], tuple[float, float, int]] = {}
        self._resting: dict[tuple[object, ...], float] = {}
        self._waits: dict[tuple[int, int], float] = {}

    def of_split(self, split: ModelSplit) -> float:
        """Products at the rate of the best one, and what tensor ranks exchange as one message a layer."""
        tokens = self.recipe.batch * self.recipe.seq // (split.data * split.cp)
        exchanged = tokens * self.model.hidden * compute_width(self.recipe)
        # Two sums a layer forward and two backward; with sequence parallelism each is two halves.
        summed = (
            4 * self.on.links.seconds("all_reduce", exchanged, split.tp, 1) * (1 - self.stack.tensor_overlap)
        )
        return self._products / self.devices + self.model.layers / split.pp * summed

    @cached_property
    def _products(self) -> float:
        each = 4 if self.frozen else 6
        flops = float(each) * matrix_parameters(self.model) * self.recipe.batch * self.recipe.seq
        if self.model.experts is not None:
            flops /= 2  # a rank's tokens do not spread evenly over its experts, and rows are rounded down
        return flops / self.on.fastest

    def of_share(
        self,
        split: ModelSplit,
        share: WorkShare,
        recompute: Recompute = "none",
        orders: Sequence[PipelineOrder] = (),
    ) -> float:
        """All computation and exchange within layers, evenly over the pipeline; with ``orders`` to choose from also how
        long each of its ranks then waits for the others.
        """
        costs = self.costs(split, share, recompute, layer.NONE)
        (whole,) = self.kinds(1, 1, "1f1b")
        total = whole.dense * costs.dense + whole.sparse * costs.sparse + costs.ends(whole)
        times = accumulation(self.recipe.batch, split.data, share.micro)
        wait = self._least_wait(split.pp, times, orders) if split.pp > 1 and orders else 0.0
        return (times + wait * (split.pp - 1)) * total / split.pp + self.once

    def _least_wait(self, pp: int, times: int, orders: Sequence[PipelineOrder]) -> float:
        """For each of the other ranks, in what one micro-batch takes there. The orders of one depth are the same."""
        known = self._waits.get((pp, times))
        if known is None:
            found = (_waits(order, pp, times).work / (pp - 1) for order in orders)
            known = self._waits[pp, times] = min(min(found), float(times))
        return known

    def of_order(
        self,
        split: ModelSplit,
        share: WorkShare,
        order: PipelineOrder,
        held: Passes = layer.NONE,
        played: bool = False,
    ) -> float:
        """The slowest rank's work, and how long it waits for the others.

        ``held``: what is moved of weights for every micro-batch, once states say that. ``played``: also of a pipeline
        that never fills, whose waiting has no formula and takes a while to find.
        """
        costs = self.costs(split, share, order.recompute, held, self._compiled(split, order))
        hosts = self._hosts(order.recompute, self._compiled(split, order))
        total = slowest = 0.0
        computed = inf
        for kind in self.kinds(split.pp, order.chunks, order.schedule):
            dense, sparse, first, last, ranks, _ = kind
            ends = costs.ends(kind) if first or last else 0.0
            seconds = dense * costs.dense + sparse * costs.sparse + ends
            seconds = max(seconds, hosts * (dense + sparse))
            total += ranks * seconds
            slowest = max(slowest, seconds)
            # Whichever rank turns out to be the slowest, its devices compute as long.
            computed = min(computed, dense * costs.dense_computed + sparse * costs.sparse_computed + ends)
        times = accumulation(self.recipe.batch, split.data, share.micro)
        always = times * self.behind * computed + self.once
        if split.pp == 1:
            return times * slowest + always
        waits = _waits(order, split.pp, times, played)
        wait = waits.work / (split.pp - 1)
        # Where a rank's own work counts for less than its wait for others, the bound holds with all work on one rank.
        worked = times * slowest + wait * (total - slowest) if times >= wait else times * total
        tokens = share.micro * self.recipe.seq // split.cp
        if split.tp > 1 and (share.sp or self.stack.parts_messages):
            tokens //= split.tp
        size = tokens * self.model.hidden * compute_width(self.recipe)
        message = self.on.links.seconds("send", size, split.pp, self.devices // split.pp)
        return worked + waits.messages * message + always

    def of_offload(
        self,
        split: ModelSplit,
        share: WorkShare,
        order: PipelineOrder,
        offload: tuple[Offload, ...],
        worked: float,
    ) -> float:
        """With states shared out as far as they can be, so that the least of them travels: every pass, or once."""
        # Of what is updated on the device, shards of gathered weights take no longer than others.
        zeros: tuple[Zero, ...] = (3, 1) if waiting(offload, "optimizer") else (3,)
        ways = [StateSharding(1, split.data, zero, offload) for zero in zeros]
        return worked + min(self._update(split, share, order, states) for states in ways)

    def of_states(
        self, split: ModelSplit, share: WorkShare, order: PipelineOrder, states: StateSharding, worked: float
    ) -> float:
        """``worked``: ``of_order``, with what these states move of weights."""
        exchange = self._exchange(split, share, order, states)
        times = accumulation(self.recipe.batch, split.data, share.micro)
        held = self.handled(split, share, states)
        costs = self.costs(split, share, order.recompute, held, self._compiled(split, order))
        layers = max(kind.dense + kind.sparse for kind in self.kinds(split.pp, order.chunks, order.schedule))
        forward, backward = layers * costs.forward, layers * costs.backward
        left = exchange.alone
        for seconds, bare, beside in (
            (exchange.forward, exchange.bare_forward, times * forward),
            (exchange.backward, exchange.bare_backward, times * backward),
            (exchange.once_forward, 0.0, forward),
            (exchange.once_backward, 0.0, backward),
        ):
            left += seconds - self.stack.overlap * min(seconds - bare, beside)
        return worked + left + self._update(split, share, order, states)

    def _host_of_layer(self, recompute: Recompute, compiled: bool) -> float:
        return sum(host.of_layer(self.on, recompute, compiled))

    def handled(self, split: ModelSplit, share: WorkShare, states: StateSharding) -> Passes:
        sharded = states.zero == 3 and placed(split, states).sharded.size > 1
        times = accumulation(self.recipe.batch, split.data, share.micro)
        # One device that works through all of a batch at once widens no gradient.
        alone = split.data * split.tp * split.cp * split.pp == 1
        return self.on.handling(sharded, times, narrow=alone and times == 1)

    def costs(
        self,
        split: ModelSplit,
        share: WorkShare,
        recompute: Recompute,
        held: Passes,
        compiled: bool | None = None,
    ) -> Costs:
        """``compiled``: None where the schedule is not known yet; then blocks are, if any schedule's are."""
        compiled = self._compiled(split, None) if compiled is None else compiled
        key = (split.tp, split.cp, *share, recompute, held, compiled)
        known = self._costs.get(key)
        if known is None:
            known = self._costs[key] = self._priced(split, share, recompute, held, compiled)
        return known

    def _compiled(self, split: ModelSplit, order: PipelineOrder | None) -> bool:
        return self._compiles(split.pp, order.schedule if order else "1f1b")

    def _compiled_blocks(self, pp: int, schedule: Schedule) -> bool:
        return self._workload(layout_of(pp=pp, schedule=schedule)).compiled

    def _priced(
        self, split: ModelSplit, share: WorkShare, recompute: Recompute, held: Passes, compiled: bool
    ) -> Costs:
        """One micro-batch of one rank. As many replicas as there are experts' ranks, so that these have a place."""
        layout = layout_of(
            dp=share.ep, tp=split.tp, sp=share.sp, cp=split.cp, cp_kind=share.cp_kind, ep=share.ep,
            micro=share.micro, recompute=recompute,
        )  # fmt: skip
        recipe = self.recipe.model_copy(update={"batch": share.ep * share.micro})
        workload = replace(self._workload(layout), recipe=recipe, compile=compiled)
        tokens, model = workload.tokens, self.model
        between = tokens / split.tp if share.sp else float(tokens)
        body = self._body(split.tp, share.sp)
        within = sum(self._seconds(workload, call) for call in tensor.calls(workload, body))
        routed = sum(
            self._seconds(workload, call) for call in expert.tokens(workload, body) if call.group != "ep"
        )
        seconds, computed, forwards, backwards = [0.0, 0.0], [0.0, 0.0], [0.0], [0.0]
        for place, count in ((0, body.dense), (1, body.sparse)):
            if not count:
                continue
            part = layer.LayerShare(
                tokens, between, share.micro, self.recipe.seq, split.tp, share.ep, place == 1, held, compiled,
                recipe.dropout > 0,
            )  # fmt: skip
            one = self.on.layer(part)
            shared = sum(context.waits(workload, self.on, body, part).values()) / body.layers
            if place:
                routed += sum(experts.waits(workload, self.on, body, part).values())
            again = {"none": 0.0, "selective": one.again, "full": one.full}[recompute]
            backward = one.input + (0.0 if self.frozen else one.weight) + again
            computed[place] = one.forward + backward
            seconds[place] = (
                computed[place] + shared + within / body.layers + (routed / count if place else 0.0)
            )
            forwards.append(one.forward)
            backwards.append(backward)
        rows = -(-model.vocab // split.tp)
        embedding = self.on.embedding(tokens, rows, held)
        head = self.on.head(tokens, rows, held)
        first, last = (
            end if self.frozen else end._replace(input=end.backward, weight=0.0) for end in (embedding, head)
        )
        dense, sparse = computed
        return Costs(seconds[0], seconds[1], first, last, dense, sparse, max(forwards), max(backwards))

    def _seconds(self, workload: Workload, call: CollectiveCall) -> float:
        ranks = workload.ranks_of(call.group)
        if call.phase in ALWAYS:
            each = within_pass(self.on, workload, call, ranks)
        else:
            each = self.on.links.seconds(call.op, call.bytes, ranks.size, ranks.stride)
        return call.count * beside_products(self.stack, workload.layout.sp, call) * each

    def _stage_kinds(self, pp: int, chunks: int, schedule: str) -> tuple[RankKind, ...]:
        return stage_kinds(self.model, pp, chunks, schedule, self.cut_by)

    def _all_layers(self, tp: int, sp: bool) -> RankParameters:
        """Without the ends."""
        whole = rank_parameters(layout_of(tp=tp, sp=sp), self.model, self.cut_by, 0)
        # Beside adapters the first block's backward pass stops early.
        return replace(whole, first=self.lora is not None, last=False)

    def _exchange(
        self, split: ModelSplit, share: WorkShare, order: PipelineOrder, states: StateSharding
    ) -> Exchange:
        """Each rank's parameters as one message."""
        body = self._body(split.tp, share.sp)
        kinds = self.kinds(split.pp, order.chunks, order.schedule)
        times = accumulation(self.recipe.batch, split.data, share.micro)
        elements = min(
            kind.dense * body.dense_block.elements
            + kind.sparse * body.sparse_block.elements
            + kind.first * body.embedding.elements
            + kind.last * body.head.elements
            for kind in kinds
        )
        passes = 0 if split.pp > 1 else times  # in a pipeline everything is exchanged once a step
        blocks = [one.elements for one in (body.dense_block, body.sparse_block) if one.elements]
        ends = body.embedding.elements + body.head.elements
        found = self._exchanged(elements, placed(split, states), passes, states.zero, ends, min(blocks))
        routed = min(kind.sparse for kind in kinds) * expert_elements(self.model, split.tp, share.ep)
        if not routed:
            return found
        more = self._exchanged(routed, placed(split, states, share.ep), passes, states.zero)
        return Exchange(*(a + b for a, b in zip(found, more, strict=True)))

    def _exchanged(
        self, elements: int, where: Placement, passes: int, zero: int, ends: int = 0, block: int = 0
    ) -> Exchange:
        """Of so many parameters on a rank: all of a kind as one message, ``passes`` times a step; 0: once, for all.

        ``ends``: of these, those of embedding and head. ``block``: those of the smallest block.
        """
        recipe, seconds = self.recipe, self.on.links.seconds
        (_, shards, stride), (_, copies, copies_stride) = where
        reduced = 0 if self.frozen else elements * reduce_width(recipe)
        summed = seconds("all_reduce", reduced // shards, copies, copies_stride) if reduced else 0.0
        if shards == 1:
            return Exchange(once_backward=summed)
        scattered = seconds("reduce_scatter", reduced, shards, stride) if reduced else 0.0
        if zero == 3:
            gathered = seconds("all_gather", elements * gathered_width(recipe), shards, stride)
            if not passes:
                return Exchange(once_forward=gathered, once_backward=summed + scattered)
            # The last group of blocks stays gathered for the backward pass; so may those that are told to persist.
            again = 0.0
            if not self.tune.persist_below:
                left = int((elements - ends) * max(0.0, 1 - UNITS[-1] / self.model.layers))
                again = seconds("all_gather", left * gathered_width(recipe), shards, stride) if left else 0.0
            bare = block * reduce_width(recipe) if reduced else 0
            return Exchange(
                passes * gathered,
                passes * (again + scattered),
                passes * seconds("all_gather", block * gathered_width(recipe), shards, stride)
                if block
                else 0.0,
                passes * seconds("reduce_scatter", bare, shards, stride) if bare else 0.0,
                once_backward=summed,
            )
        if not reduced:
            return Exchange()
        each_time = scattered if zero == 2 and passes else 0.0
        updated = seconds("all_gather", int(elements * weight_width(recipe)), shards, stride)
        ahead = self.stack.gathers_ahead
        return Exchange(
            backward=passes * each_time,
            once_forward=updated if ahead else 0.0,
            once_backward=summed + scattered - each_time,
            alone=0.0 if ahead else updated,
        )

    def _update(
        self, split: ModelSplit, share: WorkShare, order: PipelineOrder, states: StateSharding
    ) -> float:
        """The optimizer on the device; where something waits elsewhere, its travels as well."""
        elements, resting, layers = self._on_first_rank(split, share, order)
        shards = placed(split, states).sharded.size
        owned = elements / shards
        seconds = update_seconds(self.on, owned, states.zero < 3)
        if not states.offload:
            return seconds
        workload = self._offloading(split, share.micro, states)
        kept = layers * share.micro * self._kept(split, share, order.recompute, self._compiled(split, order))
        # The longer a step computes, the more hides behind it: at most so long.
        held = self.handled(split, share, states)
        costs = self.costs(split, share, order.recompute, held, self._compiled(split, order))
        forward = backward = blocks = 0.0
        for kind in self.kinds(split.pp, order.chunks, order.schedule):
            here = kind.dense + kind.sparse
            first, last = costs.first if kind.first else NO_END, costs.last if kind.last else NO_END
            blocks = max(blocks, here * costs.forward)
            forward = max(forward, here * costs.forward + first.forward + last.forward)
            backward = max(backward, here * costs.backward + first.input + last.input)
        beside = Beside(forward, backward, blocks)
        # Tensors are cut so that at least the fraction is offloaded; what arrives last is left out.
        parts = (waiting(states.offload, what) for what in Shares._fields)
        away = Shares(*(part.fraction if part else 0.0 for part in parts))
        weights = resting / shards if states.zero == 3 else resting
        has = Offloadable(owned, 0.0, weights, kept, layers)
        moved = transfer(workload, self.on.node, beside, has, away, seconds)
        return moved.seconds + moved.stays * seconds

    def _kept(self, split: ModelSplit, share: WorkShare, recompute: Recompute, compiled: bool) -> float:
        """Bytes that one layer keeps of one sequence, of the kind that keeps the least."""
        key = split.tp, split.cp, share.sp, share.cp_kind, share.ep > 1, recompute, compiled
        known = self._resting.get(key)
        if known is None:
            workload = replace(self._workload(one_sequence(split, share, recompute)), compile=compiled)
            blocks = micro_batch_bytes(workload).blocks.values()
            known = self._resting[key] = min(block.resting for block in blocks)
        return known

    def _with_offload(self, split: ModelSplit, micro: int, states: StateSharding) -> Workload:
        """A workload with all that transfers ask of a layout: what gradients leave with, and how often."""
        dp, fsdp, zero, offload = states
        return self._workload(
            layout_of(dp=dp, fsdp=fsdp, zero=zero, cp=split.cp, pp=split.pp, micro=micro, offload=offload)
        )

    def _workload(self, layout: Layout) -> Workload:
        return Workload(
            self.model,
            self.on.cluster,
            self.recipe,
            layout,
            self.stack,
            self.tune,
            self.lora,
            self.compile,
        )

    def _on_first_rank(
        self, split: ModelSplit, share: WorkShare, order: PipelineOrder
    ) -> tuple[float, float, int]:
        """Of the pipeline's first rank, before they are shared out: trained parameters, bytes of all; its layers."""
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


def _waits(order: PipelineOrder, pp: int, times: int, played: bool = False) -> Idle:
    """``played``: also of a pipeline that never fills, whose waiting has no formula and takes a while to find."""
    if played or follows(order.schedule, pp, order.chunks, times):
        return idle(order.schedule, pp, order.chunks, times)
    return Idle((pp - 1) / (3 * order.chunks), 0.0)  # the least that any schedule can have
