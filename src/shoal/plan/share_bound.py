"""Lower bounds on step time before the order of a pipeline is known: of a split, and of what a rank works on at a time.

Bounds are composed of a layer's costs, which are priced once. Each leaves out what is not decided yet, and what takes
long to say: of a split its latencies and everything but matrix products, attention and tensor ranks' exchange; of
shares what data ranks exchange (``plan/exchange_bound.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from shoal.facts.config import Lora, TuneSection
from shoal.facts.layout import Layout, Recompute, Schedule, accumulation, divisors
from shoal.facts.layout.expert_nodes import EXCHANGES
from shoal.facts.precision import compute_width
from shoal.plan.space import (
    ModelSplit,
    PipelineOrder,
    StateSharding,
    WorkShare,
    layout_of,
    placed,
)
from shoal.predict.collective_call import CollectiveCall
from shoal.predict.flops import matrix_parameters
from shoal.predict.rank_parameters import (
    RankParameters,
    rank_parameters,
)
from shoal.predict.time import context, host, layer
from shoal.predict.time import expert as experts
from shoal.predict.time.bubble import Idle, follows, idle
from shoal.predict.time.layer import Handling, Passes, Seconds
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.step import (
    ALWAYS,
    CostModel,
    RankKind,
    beside_products,
    rests,
    stage_kinds,
    within_pass,
)
from shoal.predict.traffic import expert, tensor
from shoal.predict.workload import Workload


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


class Cuts(NamedTuple):
    """How a pipeline can be cut: in each way, layers of its ranks without and with experts."""

    cuts: frozenset[frozenset[tuple[int, int]]]
    fullest: int  # layers that some rank has at least, whichever way
    most: int  # and at most
    fewest: tuple[int, int]  # that every rank has, without and with experts


@dataclass
class ShareBound:
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
        self.body = cache(self._all_layers)
        self._compiles = cache(self._compiled_blocks)
        self._least_held = cache(self._least_handled)
        self.moving = cache(self._moved_beside)
        self.measured = isinstance(self.on.kernels, MeasuredKernels)
        # Frozen weights have no gradients; where some are, that of the others is left out.
        self.frozen = self.lora is not None or self.recipe.freezes
        # A step waits for the slowest of all devices, and once for the host.
        self.behind = host.slowest(self.devices, self.on.rates.device.spread)
        self.once = host.at_least_once(self.on)
        self.cut_by = None if self.stack.even_stages else self.recipe.seq
        self._costs: dict[tuple[object, ...], Costs] = {}
        self._waits: dict[tuple[int, int, str, int], float] = {}
        self._cut: dict[tuple[int, str, int], Cuts] = {}

    def of_split(self, split: ModelSplit, orders: Sequence[PipelineOrder] = ()) -> float:
        """Products at the rate of the best one, and what tensor ranks exchange as one message a layer; with ``orders``
        to choose from also how long a pipeline's ranks wait for one another.
        """
        tokens = self.recipe.batch * self.recipe.seq // (split.data * split.cp)
        exchanged = tokens * self.model.hidden * compute_width(self.recipe)
        # Two sums a layer forward and two backward; with sequence parallelism each is two halves, which a library may
        # do better than the whole.
        whole, *halves = (
            self.on.links.seconds(op, exchanged, split.tp, 1)
            for op in ("all_reduce", "all_gather", "reduce_scatter")
        )
        summed = 4 * min(whole, sum(halves)) * (1 - self.stack.tensor_overlap)
        each = (self._products + self._attention) / self.devices
        worked = each + self.model.layers / split.pp * summed
        if split.pp == 1:
            return worked + self.behind * each
        if not orders:
            return worked
        # The smaller the micro-batch, the more of them fill the pipeline.
        times = max(1, self.recipe.batch // split.data)
        least = min(self._least_wait(split.pp, some, orders) / some for some in divisors(times))
        return worked * (1 + least * (split.pp - 1))

    def of_tokens(self, split: ModelSplit, share: WorkShare) -> float:
        """Every micro-batch reads all weights of a layer for each of its products, however few tokens it has. What was
        measured may come from a cache.
        """
        if self.measured:
            return 0.0
        seconds = 0.0
        body, moved = self.body(split.tp, share.sp), self.on.kernels.moved
        for part in self._parts(split, share, layer.FREE, False):
            count = body.sparse if part.experts else body.dense
            shapes = layer.products(self.model, part, self.stack.joined)
            read = sum(one.parameters for one in shapes)
            written = sum(one.times * one.groups * one.rows * (one.inner + one.columns) for one in shapes)
            seconds += count * (2 if self.frozen else 3) * moved((read + written) * self.on.kernels.width)
        return self._micro_batches(split, share) * seconds / self.on.faster

    def of_layers(self, split: ModelSplit, share: WorkShare, compiled: bool) -> float:
        """All that is computed within layers, evenly over all devices."""
        body, seconds = self.body(split.tp, share.sp), 0.0
        for part in self._parts(split, share, layer.FREE, compiled):
            one = self.on.layer(part)
            worked = one.forward + one.input + (0.0 if self.frozen else one.weight)
            seconds += (body.sparse if part.experts else body.dense) * worked
        return self._micro_batches(split, share) * seconds

    def of_rate(self, split: ModelSplit, share: WorkShare, compiled: bool) -> float:
        """All computation and exchange within layers, evenly over all devices: whatever the depth of a pipeline."""
        costs = self.costs(split, share, "none", self.least_held(split, share), compiled)
        (whole,) = self.kinds(1, 1, "1f1b")
        total = whole.dense * costs.dense + whole.sparse * costs.sparse + costs.ends(whole)
        return self._micro_batches(split, share) * total + self.once

    def _micro_batches(self, split: ModelSplit, share: WorkShare) -> float:
        """How many whole networks' passes over one a device works off."""
        return self.recipe.batch * split.tp * split.cp / (self.devices * share.micro)

    @cached_property
    def _attention(self) -> float:
        """Of a whole batch, on one device. What was measured depends on its shape, so it is left out there."""
        if self.measured:
            return 0.0
        recipe, layers = self.recipe, self.model.layers
        whole = layer.LayerShare(recipe.batch * recipe.seq, 0.0, recipe.batch, recipe.seq, 1, 1, False)
        return layers * sum(self.on.attention(whole))

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
        compiled: bool | None = None,
    ) -> float:
        """All computation and exchange within layers, evenly over the pipeline; with ``orders`` to choose from also how
        long each of its ranks then waits for the others. ``compiled``: None where not all of them agree.
        """
        costs = self.costs(split, share, recompute, self.least_held(split, share), compiled)
        (whole,) = self.kinds(1, 1, "1f1b")
        total = whole.dense * costs.dense + whole.sparse * costs.sparse + costs.ends(whole)
        times = accumulation(self.recipe.batch, split.data, share.micro)
        if split.pp == 1:
            computed = whole.dense * costs.dense_computed + whole.sparse * costs.sparse_computed
            return times * (total + self.behind * (computed + costs.ends(whole))) + self.once
        if not orders:
            return times * total / split.pp + self.once
        wait = self._least_wait(split.pp, times, orders)
        ways = self._ways(split.pp, orders)
        if whole.sparse:
            most = min(
                max(dense * costs.dense + sparse * costs.sparse for dense, sparse in way) for way in ways.cuts
            )
            computed = min(
                dense * costs.dense_computed + sparse * costs.sparse_computed
                for way in ways.cuts
                for dense, sparse in way
            )
        else:
            most, computed = ways.fullest * costs.dense, ways.fewest[0] * costs.dense_computed
        slowest = max(total / split.pp, most)
        return times * (slowest + self.behind * computed) + wait * (total - slowest) + self.once

    def _ways(self, pp: int, orders: Sequence[PipelineOrder]) -> Cuts:
        key = pp, orders[0].schedule, len(orders)
        known = self._cut.get(key)
        if known is None:
            cuts = frozenset(
                frozenset((kind.dense, kind.sparse) for kind in self.kinds(pp, *cut))
                for cut in {(order.chunks, order.schedule) for order in orders}
            )
            layers = [[dense + sparse for dense, sparse in cut] for cut in cuts]
            every = [kind for cut in cuts for kind in cut]
            known = self._cut[key] = Cuts(
                cuts,
                min(max(cut) for cut in layers),
                max(max(cut) for cut in layers),
                (min(dense for dense, _ in every), min(sparse for _, sparse in every)),
            )
        return known

    def _least_wait(self, pp: int, times: int, orders: Sequence[PipelineOrder]) -> float:
        """For each of the other ranks, in what one micro-batch takes there."""
        key = pp, times, orders[0].schedule, len(orders)
        known = self._waits.get(key)
        if known is None:
            found = (waits(order, pp, times).work / (pp - 1) for order in orders)
            known = self._waits[key] = min(min(found), float(times))
        return known

    def least_held(self, split: ModelSplit, share: WorkShare) -> Handling:
        """Whatever becomes of states: in a pipeline no gradients add up in shards."""
        if split.pp == 1:
            return layer.FREE
        return self._least_held(accumulation(self.recipe.batch, split.data, share.micro))

    def _least_handled(self, times: int) -> Handling:
        least = Passes(*map(min, self.on.handling("whole", times), self.on.handling("kept", times)))
        return Handling(least, least)

    def handled(self, split: ModelSplit, share: WorkShare, states: StateSharding) -> Handling:
        """At least, also where experts are on fewer ranks than here."""
        times = accumulation(self.recipe.batch, split.data, share.micro)
        # One device that works through all of a batch at once widens no gradient.
        alone = split.data * split.tp * split.cp * split.pp == 1
        found = []
        for ep in (1, share.ep):
            sharded = states.zero == 3 and placed(split, states, ep).sharded.size > 1
            found.append(self.on.handling(rests(sharded, split.pp), times, narrow=alone and times == 1))
        dense, routed = found
        if self.model.experts is None:
            return Handling(dense, dense)
        whole = self.on.handling("whole", times, narrow=alone and times == 1)
        return Handling(dense, Passes(*map(min, routed, whole)))

    def costs(
        self,
        split: ModelSplit,
        share: WorkShare,
        recompute: Recompute,
        held: Handling,
        compiled: bool | None = None,
    ) -> Costs:
        """``compiled``: None where the schedule is not known yet; then blocks are, if any schedule's are."""
        compiled = self.compiled(split, None) if compiled is None else compiled
        # What moves beside products is added: it differs with every number of micro-batches. Where kernels were
        # measured, it is measured as well.
        within = held if self.measured else layer.FREE
        key = (split.tp, split.cp, *share, recompute, within, compiled)
        known = self._costs.get(key)
        if known is None:
            known = self._costs[key] = self._priced(split, share, recompute, within, compiled)
        return known if within == held else self._holding(known, split, share, recompute, held)

    def _holding(
        self, costs: Costs, split: ModelSplit, share: WorkShare, recompute: Recompute, held: Handling
    ) -> Costs:
        """With what moves of weights and their gradients."""
        dense, sparse, last = self.moving(split.tp, share.ep, held)
        times = 2 if recompute == "full" else 1
        more = times * dense.forward + dense.backward, times * sparse.forward + sparse.backward
        end = costs.last
        return Costs(
            costs.dense + more[0],
            costs.sparse + more[1],
            costs.first,
            Seconds(end.forward + last.forward, end.input + last.backward, end.weight, end.again, end.full),
            costs.dense_computed + more[0],
            costs.sparse_computed + more[1],
            costs.forward + max(dense.forward, sparse.forward),
            costs.backward + max(more[0] - dense.forward, more[1] - sparse.forward),
        )

    def _moved_beside(self, tp: int, ep: int, held: Handling) -> list[Passes]:
        """Seconds beside products: of a layer without experts, of one with them, and of the head."""
        moved, (own, routed) = self.on.kernels.moved, held
        sizes = [*self._matrices_of(tp, ep), (-(-self.model.vocab // tp) * self.model.hidden, 0)]
        return [
            Passes(
                moved(mine * own.forward + others * routed.forward),
                0.0 if self.frozen else moved(mine * own.backward + others * routed.backward),
            )
            for mine, others in sizes
        ]

    def _matrices_of(self, tp: int, ep: int) -> list[tuple[int, int]]:
        """Parameters of a layer without and of one with experts: all but experts' own, and these."""
        body, found = self.body(tp, True), []
        for sparse, count in ((False, body.dense), (True, body.sparse)):
            share = layer.LayerShare(1, 1.0, 1, 1, tp, ep, sparse)
            shapes = layer.products(self.model, share, self.stack.joined) if count else []
            routed = sum(one.parameters for one in shapes if one.routed)
            found.append((sum(one.parameters for one in shapes) - routed, routed))
        return found

    def compiled(self, split: ModelSplit, order: PipelineOrder | None) -> bool:
        return self._compiles(split.pp, order.schedule if order else "1f1b")

    def _compiled_blocks(self, pp: int, schedule: Schedule) -> bool:
        return self._workload(layout_of(pp=pp, schedule=schedule)).compiled

    def _priced(
        self, split: ModelSplit, share: WorkShare, recompute: Recompute, held: Handling, compiled: bool
    ) -> Costs:
        """One micro-batch of one rank. As many replicas as there are experts' ranks, so that these have a place."""
        layout = layout_of(
            dp=share.ep, tp=split.tp, sp=share.sp, cp=split.cp, cp_kind=share.cp_kind, ep=share.ep,
            micro=share.micro, recompute=recompute,
        )  # fmt: skip
        recipe = self.recipe.model_copy(update={"batch": share.ep * share.micro})
        workload = replace(self._workload(layout), recipe=recipe, compile=compiled)
        tokens, model = workload.tokens, self.model
        body = self.body(split.tp, share.sp)
        # Beside adapters every layer is taken for the first, which exchanges the least: a rank may have few others.
        each = (
            body
            if self.lora is None
            else replace(body, dense=int(body.dense > 0), sparse=int(not body.dense))
        )
        within = sum(self._seconds(workload, call) for call in tensor.calls(workload, each))
        within *= body.layers / each.layers
        routed = sum(
            self._seconds(workload, call)
            for call in expert.tokens(workload, body)
            if call.group not in EXCHANGES
        )
        seconds, computed, forwards, backwards = [0.0, 0.0], [0.0, 0.0], [0.0], [0.0]
        for part in self._parts(split, share, held, compiled):
            place, count = (1, body.sparse) if part.experts else (0, body.dense)
            one = self.on.layer(part)
            shared = sum(context.waits(workload, self.on, body, part).values()) / body.layers
            if place:
                waits = experts.waits(workload, self.on, body, part).values()
                routed += sum(sum(by_pass.values()) for by_pass in waits)
            again = {"none": 0.0, "selective": one.again, "full": one.full}[recompute]
            backward = one.input + (0.0 if self.frozen else one.weight) + again
            computed[place] = one.forward + backward
            seconds[place] = (
                computed[place] + shared + within / body.layers + (routed / count if place else 0.0)
            )
            forwards.append(one.forward)
            backwards.append(backward)
        rows = -(-model.vocab // split.tp)
        embedding = self.on.embedding(tokens, rows, held.dense)
        head = self.on.head(tokens, rows, held.dense, compiled)
        first, last = (
            end if self.frozen else end._replace(input=end.backward, weight=0.0) for end in (embedding, head)
        )
        dense, sparse = computed
        return Costs(seconds[0], seconds[1], first, last, dense, sparse, max(forwards), max(backwards))

    def _parts(
        self, split: ModelSplit, share: WorkShare, held: Handling, compiled: bool
    ) -> Iterator[layer.LayerShare]:
        """A rank's share of a layer, of each kind that there is."""
        body = self.body(split.tp, share.sp)
        tokens = share.micro * self.recipe.seq // split.cp
        between = tokens / split.tp if share.sp else float(tokens)
        turns = split.cp if share.cp_kind == "ring" else 1
        unpacks = self.lora is not None and self.lora.base == "nf4"
        for routed, count in ((False, body.dense), (True, body.sparse)):
            if count:
                yield layer.LayerShare(
                    tokens, between, share.micro, self.recipe.seq, split.tp, share.ep, routed, held, compiled,
                    self.recipe.dropout > 0, turns, unpacks,
                )  # fmt: skip

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


def waits(order: PipelineOrder, pp: int, times: int, played: bool = False) -> Idle:
    """``played``: also of a pipeline that never fills, whose waiting has no formula and takes a while to find."""
    if played or follows(order.schedule, pp, order.chunks, times):
        return idle(order.schedule, pp, order.chunks, times)
    return Idle((pp - 1) / (3 * order.chunks), 0.0)  # the least that any schedule can have
