"""Lower bounds on step time for a partially decided layout.

Bounds are composed of a layer's costs, which are priced once. Each leaves out what is not decided yet, and what takes
long to say: of a split its latencies and everything but matrix products and tensor ranks' exchange; of shares the idle
pipeline; of orders what data ranks exchange; of states the latency of their many calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.facts.config import Lora, TuneSection
from shoal.facts.layout import RECOMPUTES, Layout, Offload, Recompute, Schedule, Zero, accumulation
from shoal.facts.layout.float8 import gathered_width
from shoal.facts.layout.parameter_groups import Placement
from shoal.facts.precision import compute_width, reduce_width, weight_width
from shoal.facts.recipe import Recipe
from shoal.plan.pipelines import Columns, Filled, Pipelines, PipelineTables
from shoal.plan.space import (
    UNITS,
    ModelSplit,
    StateSharding,
    WorkShare,
    layout_of,
    one_sequence,
    placed,
)
from shoal.plan.state_columns import StateColumns
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
from shoal.predict.time.layer import Passes
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.offload import Beside, Offloadable, Shares, Ways, added, how
from shoal.predict.time.step import (
    ALWAYS,
    CostModel,
    resting_bytes,
    update_seconds,
)
from shoal.predict.traffic import expert, tensor
from shoal.predict.workload import Workload


class Exchange(NamedTuple):
    """Seconds that data ranks exchange in a step, by what they do it beside."""

    forward: float
    backward: float
    alone: float


class Costs(NamedTuple):
    """Seconds of one micro-batch, on a rank's share of it. Of a layer without experts and of one with them: what the
    device computes forward, backward and again, and what it exchanges within each. Of embedding and head: what it
    computes forward and backward, and what it exchanges more in the passes.
    """

    dense: tuple[float, ...]
    sparse: tuple[float, ...]
    first: tuple[float, ...]
    last: tuple[float, ...]


NO_LAYER, NO_END = (0.0,) * 6, (0.0,) * 5


class OrderTimes(NamedTuple):
    """By share, by what is computed again, by pipeline."""

    seconds: Columns  # of a step, at least
    # Of the slowest rank and a micro-batch: its layers forward, and backward with what is computed again; with ends.
    forward: Columns
    backward: Columns
    ahead: Columns
    back: Columns
    slowest: NDArray[
        np.intp
    ]  # which kind of ranks that is; ``ANY`` where it is not known: the above is the most then

    def at(self, place: tuple[NDArray[np.intp], ...]) -> tuple[Columns, ...]:
        return tuple(column[place] for column in self)


class Rows(NamedTuple):
    """Layouts, each by the numbers of its share, its recomputation, its pipeline and its states."""

    share: NDArray[np.intp]
    recompute: NDArray[np.intp]
    pipeline: NDArray[np.intp]
    states: NDArray[np.intp]


ANY = -1
# How weights are handled: not known yet, gathered for their use, or whole.
Held = Literal["sharded", "whole"] | None


@dataclass
class TimeBound:
    """Of one model on one cluster. Of many layouts at once, in columns."""

    on: CostModel
    tune: TuneSection
    lora: Lora | None
    devices: int
    space_pipelines: Callable[[int], Sequence[tuple[Schedule, int]]]  # those that are searched, by depth
    compile: bool | None = None

    def __post_init__(self) -> None:
        self.model, self.recipe, self.stack = self.on.model, self.on.recipe, self.on.stack
        self.cut_by = None if self.stack.even_stages else self.recipe.seq
        self.tables = PipelineTables(self.model, self.cut_by)
        # By what each depends on, and not by the model, whose hash takes a while.
        self.pipelines = cache(self._pipelines)
        self._body = cache(self._all_layers)
        self._with_batch = cache(self._smaller)
        self._compiles = cache(self._compiled_blocks)
        self._transfers: dict[tuple[int, int, int], tuple[Columns, StateColumns]] = {}
        self._moves: dict[tuple[object, ...], Ways] = {}
        self._orders: dict[tuple[object, ...], OrderTimes] = {}
        self._filled: dict[tuple[int, tuple[int, ...]], Filled] = {}
        self._updates: dict[tuple[float, bool], float] = {}
        self._costs: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._first: dict[tuple[object, ...], tuple[Columns, Columns, Columns]] = {}
        self._resting: dict[tuple[object, ...], float] = {}

    def of_split(self, split: ModelSplit) -> float:
        """Products at the rate of the best one, and what tensor ranks exchange as one message a layer."""
        tokens = self.recipe.batch * self.recipe.seq // (split.data * split.cp)
        exchanged = tokens * self.model.hidden * compute_width(self.recipe)
        # Two sums a layer forward and two backward; with sequence parallelism each is two halves.
        summed = 4 * self.on.links.seconds("all_reduce", exchanged, split.tp, 1)
        return self._products / self.devices + self.model.layers / split.pp * summed

    @cached_property
    def _products(self) -> float:
        each = 4 if self.lora else 6
        flops = float(each) * matrix_parameters(self.model) * self.recipe.batch * self.recipe.seq
        if self.model.experts is not None:
            flops /= 2  # a rank's tokens do not spread evenly over its experts, and rows are rounded down
        return flops / self.on.fastest

    def of_orders(
        self, split: ModelSplit, shares: Sequence[WorkShare], held: Held = None, again: bool = True
    ) -> OrderTimes:
        """Of every order of shares that differ only in the micro-batch: the slowest rank's work, and how long it waits
        for the others. By share, by what is computed again, by pipeline.

        ``held``: what is moved of weights for every micro-batch, once states say that. ``again``: also of what is
        computed again, which takes no less than without.
        """
        moved = tuple(
            layer.NONE if held is None else self.handled(split, one, held == "sharded") for one in shares
        )
        key = split, shares[0], len(shares), moved, again
        known = self._orders.get(key)
        if known is None:
            known = self._orders[key] = self._of_orders(split, shares, moved, again)
        return known

    def _of_orders(
        self, split: ModelSplit, shares: Sequence[WorkShare], held: Sequence[Passes], again: bool
    ) -> OrderTimes:
        table, times = self.pipelines(split.pp), self.times(split, shares)
        costs = self._columns(split, shares, held, RECOMPUTES if again else RECOMPUTES[:1])[
            :, :, table.compiled
        ]
        columns = np.moveaxis(costs, -1, 0)[
            ..., None
        ]  # by number, share, recomputation, pipeline, kind of rank
        dense, sparse, first, last = columns[:6], columns[6:12], columns[12:17], columns[17:]
        passes = [
            (dense[way] + dense[way + 3]) * table.dense
            + (sparse[way] + sparse[way + 3]) * table.sparse
            + first[way + 2] * table.first
            + last[way + 2] * table.last
            for way in range(3)
        ]
        ahead, back = (first[way] * table.first + last[way] * table.last for way in (0, 1))
        passes.append(ahead + back)
        seconds = self._with_host(split, table, passes)
        forward = dense[0] * table.dense + sparse[0] * table.sparse
        backward = (dense[1] + dense[2]) * table.dense + (sparse[1] + sparse[2]) * table.sparse
        slowest, total = seconds.max(axis=-1), (seconds * table.ranks).sum(axis=-1)
        which = seconds.argmax(axis=-1) if self._sure else np.full(slowest.shape, ANY)
        beside = (
            np.take_along_axis(one, which[..., None], -1)[..., 0] if self._sure else one.max(axis=-1)
            for one in (forward, backward, forward + ahead, backward + back)
        )
        often = times[:, None, None]
        if split.pp == 1:
            return OrderTimes._make((often * slowest, *beside, which))
        found = self.filled(split, shares)
        wait = (found.work / (split.pp - 1))[:, None]
        # Where a rank's own work counts for less than its wait for others, the bound holds with all work on one rank.
        worked = np.where(often >= wait, often * slowest + wait * (total - slowest), often * total)
        sends = np.array([self._message(split, share) for share in shares])
        return OrderTimes._make((worked + found.messages[:, None] * sends[:, None, None], *beside, which))

    @property
    def _sure(self) -> bool:
        """Whether all of a rank's time is counted, and with it which rank is the slowest."""
        return self._trains and not isinstance(self.on.kernels, MeasuredKernels)

    def _with_host(self, split: ModelSplit, table: Pipelines, passes: list[Columns]) -> Columns:
        """Passes forward, backward and again, and of the ends: each as long as device and host take together."""
        layers, there = (table.dense + table.sparse) * host.spread(split.tp), table.ranks > 0
        counted = self._hosts[: passes[0].shape[1]]
        hosts = [way[:, table.compiled][..., None] * layers for way in np.moveaxis(counted, -1, 0)]
        if isinstance(self.on.kernels, MeasuredKernels):  # the host runs ahead from one pass to another
            found: Columns = np.maximum(sum(passes), sum(hosts))
            return found * there
        started = (host.HOST_HEAD * table.last + host.HOST_EMBEDDING * table.first) * self.stack.host
        total: Columns = np.zeros(passes[0].shape)
        for device, starts in zip(passes, [*hosts, started], strict=True):
            both = (device**host.BLEND + starts**host.BLEND) ** (1 / host.BLEND)
            total = total + np.where(device > 0, both, 0.0)
        return total * there

    def of_states(
        self,
        split: ModelSplit,
        shares: Sequence[WorkShare],
        rows: Rows,
        states: StateColumns,
        exchanged: bool = True,
    ) -> Columns:
        """Of whole layouts but for their units. Without ``exchanged``, whatever data ranks exchange."""
        table, share = self.pipelines(split.pp), shares[0]
        kind, shards, lean = states.kind[rows.states], states.ranks, states.zero < 3
        sharded = (shards > 1) & ~lean
        whole = self.of_orders(split, shares, "whole") if not sharded.all() else None
        in_shards = self.of_orders(split, shares, "sharded") if sharded.any() else None
        place = rows.share, rows.recompute, rows.pipeline
        if whole is None or in_shards is None:
            worked, forward, backward, ahead, back, which = (whole or in_shards).at(place)  # type: ignore[union-attr]
        else:
            pairs = zip(in_shards.at(place), whole.at(place), strict=True)
            worked, forward, backward, ahead, back, which = (np.where(sharded[kind], *pair) for pair in pairs)
        times = self.times(split, shares)[rows.share]
        seconds: Columns = worked
        if exchanged:
            # It hides behind every micro-batch's pass, and once more what comes at the end of a step; in a pipeline
            # behind one pass.
            each, once = self._exchanges(split, share, states.kinds, np.unique(rows.pipeline))
            passes = np.ones(len(times)) if split.pp > 1 else times
            place = rows.pipeline, which, kind
            found = once[place] + passes[:, None] * each[place]
            overlap, behind = self.stack.overlap, times + 1 if split.pp == 1 else 1.0
            seconds = seconds + found[:, 2]
            for column, computed in ((0, forward), (1, backward)):
                seconds = (
                    seconds + found[:, column] - overlap * np.minimum(found[:, column], behind * computed)
                )
        elements, resting, here = self.on_first_rank(split, share)
        owned = elements[:, None] / shards
        updates = np.array(
            [[self._updated(one, zero) for one, zero in zip(row, lean, strict=True)] for row in owned]
        )
        update = updates[rows.pipeline, kind]
        owner = states.owner[rows.states]
        away = states.away[owner]
        if not away.any():
            return np.asarray(seconds + update)
        several = [int(count > 1) for count in self.times(split, shares)]
        ways = self._ways(split, states)
        kept = np.array(
            [[self._kept(split, share, again, some) for some in (False, True)] for again in RECOMPUTES]
        )
        micro = np.array([one.micro for one in shares], dtype=float)[rows.share]
        has = Offloadable._make(
            (
                owned[rows.pipeline, kind],
                np.zeros(len(times)),
                (resting[:, None] / np.where(lean, 1, shards))[rows.pipeline, kind],
                here[rows.pipeline] * micro * kept[rows.recompute, table.compiled[rows.pipeline]],
                here[rows.pipeline],
            )
        )
        # The longer a step computes, the more hides behind it: at most so long.
        beside = Beside._make((ahead, back, forward))
        how_moved = Ways._make(np.moveaxis(ways[np.array(several)[rows.share], kind, owner], -1, 0))
        # Tensors are cut so that at least the fraction is offloaded; what arrives last is left out.
        shares_away = Shares._make(away.T)
        moved = added(
            how_moved, self.on.node, beside, has, shares_away, update, times, np.maximum, np.minimum
        )
        offloads = away.any(axis=1)
        return np.asarray(seconds + np.where(offloads, moved + (1 - shares_away.optimizer) * update, update))

    def times(self, split: ModelSplit, shares: Sequence[WorkShare]) -> Columns:
        return np.array(
            [accumulation(self.recipe.batch, split.data, one.micro) for one in shares], dtype=float
        )

    def filled(self, split: ModelSplit, shares: Sequence[WorkShare]) -> Filled:
        times = tuple(accumulation(self.recipe.batch, split.data, one.micro) for one in shares)
        known = self._filled.get((split.pp, times))
        if known is None:
            known = self.tables.filled(split.pp, self.pipelines(split.pp).names, times)
            self._filled[split.pp, times] = known
        return known

    def _pipelines(self, pp: int) -> Pipelines:
        names = self.space_pipelines(pp)
        return self.tables.pipelines(pp, names, [self._compiles(pp, schedule) for schedule, _ in names])

    def _message(self, split: ModelSplit, share: WorkShare) -> float:
        tokens = share.micro * self.recipe.seq // split.cp
        if split.tp > 1 and (share.sp or self.stack.parts_messages):
            tokens //= split.tp
        size = tokens * self.model.hidden * compute_width(self.recipe)
        return self.on.links.seconds("send", size, split.pp, self.devices // split.pp)

    @cached_property
    def _hosts(self) -> Columns:
        """By what is computed again, and whether blocks are compiled."""
        found = [[host.of_layer(self.on, again, some) for some in (False, True)] for again in RECOMPUTES]
        return np.array(found)

    def _columns(
        self,
        split: ModelSplit,
        shares: Sequence[WorkShare],
        held: Sequence[Passes],
        recomputes: Sequence[Recompute],
    ) -> Columns:
        """Costs by share, by what is computed again, by whether blocks are compiled: those that a pipeline has."""
        compiled = sorted({*self.pipelines(split.pp).compiled.tolist()})
        found = np.zeros((len(shares), len(recomputes), 2, 2 * len(NO_LAYER) + 2 * len(NO_END)))
        for row, (share, moved) in enumerate(zip(shares, held, strict=True)):
            for column, again in enumerate(recomputes):
                for some in compiled:
                    found[row, column, some] = self.costs(split, share, again, moved, bool(some))
        return found

    def _exchanges(
        self, split: ModelSplit, share: WorkShare, states: Sequence[StateSharding], wanted: NDArray[np.intp]
    ) -> tuple[Columns, Columns]:
        """What data ranks exchange by pipeline and states: for every pass, and once."""
        table = self.pipelines(split.pp)
        # The last kind of ranks is any.
        each = np.zeros((len(table.names), table.ranks.shape[1] + 1, len(states), 3))
        once = np.zeros_like(each)
        known: dict[tuple[int, int], tuple[Columns, Columns]] = {}
        for row in wanted:
            kinds = self.elements(split, share, row)
            for column, elements in enumerate(
                [*kinds, (min(one[0] for one in kinds), min(one[1] for one in kinds))]
            ):
                if elements not in known:
                    found = [
                        np.array([self._exchange(split, share, *elements, one, passes) for one in states])
                        for passes in (1, 2)
                    ]
                    known[elements] = found[1] - found[0], 2 * found[0] - found[1]
                column = column if column < len(kinds) else ANY
                each[row, column], once[row, column] = known[elements]
        return each, once

    def _updated(self, elements: float, whole: bool) -> float:
        key = elements, whole
        known = self._updates.get(key)
        if known is None:
            known = self._updates[key] = update_seconds(self.on, elements, whole)
        return known

    def _ways(self, split: ModelSplit, states: StateColumns) -> Columns:
        """All that transfers ask of a layout, what gradients leave with, and how often: by whether micro-batches are
        several, by kind of states, by what is offloaded.
        """
        key = id(states), min(2, split.pp), min(2, split.cp)
        known = self._transfers.get(key)
        if known is None:
            # Whether ranks are several matters, not how many.
            few = [(min(2, one.dp), min(2, one.fsdp), one.zero) for one in states.kinds]
            classes = list(dict.fromkeys(few))
            found = [
                [[self._how(split, one, offload, times) for offload in states.offloads] for one in classes]
                for times in (1, 2)
            ]
            by_kind = np.array(found)[:, [classes.index(one) for one in few]]
            known = self._transfers[key] = by_kind, states  # kept, so that no others have its number
        return known[0]

    def _how(
        self, split: ModelSplit, few: tuple[int, int, Zero], offload: tuple[Offload, ...], times: int
    ) -> Ways:
        dp, fsdp, zero = few
        cp, pp = min(2, split.cp), min(2, split.pp)
        key = *few, cp, pp, id(offload), times
        known = self._moves.get(key)
        if known is None:
            layout = layout_of(dp=dp, fsdp=fsdp, zero=zero, cp=cp, pp=pp, micro=1, offload=offload)
            workload = replace(self._workload(layout), recipe=self._with_batch(dp * fsdp * times))
            known = self._moves[key] = how(workload, self.on.node)
        return known

    def handled(self, split: ModelSplit, share: WorkShare, sharded: bool) -> Passes:
        times = accumulation(self.recipe.batch, split.data, share.micro)
        # One device that works through all of a batch at once widens no gradient.
        alone = split.data * split.tp * split.cp * split.pp == 1
        return self.on.handling(sharded, times, narrow=alone and times == 1)

    def costs(
        self, split: ModelSplit, share: WorkShare, recompute: Recompute, held: Passes, compiled: bool
    ) -> tuple[float, ...]:
        """As ``Costs``, one after the other."""
        key = (split.tp, split.cp, *share, recompute, held, compiled)
        known = self._costs.get(key)
        if known is None:
            found = self._priced(split, share, recompute, held, compiled)
            known = self._costs[key] = tuple(value for part in found for value in part)
        return known

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
        recipe = self._with_batch(share.ep * share.micro)
        workload = Workload(
            self.model, self.on.cluster, recipe, layout, self.stack, self.tune, self.lora, compiled
        )
        tokens, model = workload.tokens, self.model
        between = tokens / split.tp if share.sp else float(tokens)
        body = self._body(split.tp, share.sp)
        within = self._by_phase(workload, tensor.calls(workload, body))
        routed = self._by_phase(workload, expert.tokens(workload, body))
        layers: list[tuple[float, ...]] = [NO_LAYER, NO_LAYER]
        for place, count in ((0, body.dense), (1, body.sparse)):
            if not count:
                continue
            part = layer.LayerShare(
                tokens, between, share.micro, self.recipe.seq, split.tp, share.ep, place == 1, held, compiled,
                recipe.dropout > 0,
            )  # fmt: skip
            one = self.on.layer(part)
            shared = {
                str(phase): waits for phase, waits in context.waits(workload, self.on, body, part).items()
            }
            sent = (
                {str(phase): waits for phase, waits in experts.waits(workload, self.on, body, part).items()}
                if place
                else {}
            )
            again = {"none": 0.0, "selective": one.again, "full": one.full}[recompute]
            exchanged = (
                (within.get(phase, 0.0) + shared.get(phase, 0.0)) / body.layers
                + (place and (routed.get(phase, 0.0) + sent.get(phase, 0.0)) / count)
                for phase in ALWAYS
            )
            layers[place] = one.forward, one.input + self._trains * one.weight, again, *exchanged
        rows = -(-model.vocab // split.tp)
        ends = []
        for end, found in (
            (replace(body, first=True), self.on.embedding(tokens, rows, held)),
            (replace(body, last=True), self.on.head(tokens, rows, held)),
        ):
            computed = found.forward, found.input + self._trains * found.weight
            more = self._by_phase(workload, tensor.calls(workload, end))
            ends.append((*computed, *(more.get(phase, 0.0) - within.get(phase, 0.0) for phase in ALWAYS)))
        return Costs(layers[0], layers[1], *ends)

    @property
    def _trains(self) -> bool:
        """Whether all weights have gradients; of some, nothing is counted."""
        return self.lora is None and not self.recipe.freezes

    def _by_phase(self, workload: Workload, calls: Iterable[CollectiveCall]) -> dict[str, float]:
        found: dict[str, float] = {}
        for call in calls:
            if call.group != "ep":
                found[call.phase] = found.get(call.phase, 0.0) + self._seconds(workload, call)
        return found

    def _seconds(self, workload: Workload, call: CollectiveCall) -> float:
        if call.group == "tp":  # of neighbours, as nearly all of these are
            return call.count * self.on.links.seconds(call.op, call.bytes, workload.layout.tp, 1)
        ranks = workload.ranks_of(call.group)
        return call.count * self.on.links.seconds(call.op, call.bytes, ranks.size, ranks.stride)

    def _smaller(self, batch: int) -> Recipe:
        return self.recipe.model_copy(update={"batch": batch})

    def _all_layers(self, tp: int, sp: bool) -> RankParameters:
        """Without the ends."""
        whole = rank_parameters(layout_of(tp=tp, sp=sp), self.model, self.cut_by, 0)
        # Beside adapters the first block's backward pass stops early.
        return replace(whole, first=self.lora is not None, last=False)

    def elements(self, split: ModelSplit, share: WorkShare, pipeline: int) -> list[tuple[int, int]]:
        """Of every kind of ranks: parameters that all data ranks have, and experts. Ends are left out."""
        body, table = self._body(split.tp, share.sp), self.pipelines(split.pp)
        routed = expert_elements(self.model, split.tp, share.ep) if self.model.experts else 0
        return [
            (
                int(dense) * body.dense_block.elements + int(sparse) * body.sparse_block.elements,
                int(sparse) * routed,
            )
            for dense, sparse, ranks in zip(
                table.dense[pipeline], table.sparse[pipeline], table.ranks[pipeline], strict=True
            )
            if ranks
        ]

    def _exchange(
        self,
        split: ModelSplit,
        share: WorkShare,
        elements: int,
        routed: int,
        states: StateSharding,
        passes: int,
    ) -> Exchange:
        """Each rank's blocks as one message, so often a step; in a pipeline everything is exchanged once."""
        found = self._exchanged(elements, placed(split, states), passes, split.pp > 1, states.zero)
        if not routed:
            return found
        more = self._exchanged(routed, placed(split, states, share.ep), passes, split.pp > 1, states.zero)
        return Exchange(*(a + b for a, b in zip(found, more, strict=True)))

    def _exchanged(self, elements: int, where: Placement, passes: int, piped: bool, zero: int) -> Exchange:
        """Of so many parameters on a rank: all of a kind as one message, ``passes`` times a step."""
        recipe, seconds = self.recipe, self.on.links.seconds
        (_, shards, stride), (_, copies, copies_stride) = where
        reduced = 0 if self.lora else elements * reduce_width(recipe)
        backward = 0.0
        if reduced:
            backward = seconds("all_reduce", reduced // shards, copies, copies_stride)
        if shards == 1:
            return Exchange(0.0, backward, 0.0)
        scattered = seconds("reduce_scatter", reduced, shards, stride) if reduced else 0.0
        if zero == 3:
            gathered = passes * seconds("all_gather", elements * gathered_width(recipe), shards, stride)
            # The last group of blocks stays gathered for the backward pass; so may those that are told to persist.
            again = 0.0
            if not piped and not self.tune.persist_below:
                again = gathered * max(0.0, 1 - UNITS[-1] / self.model.layers)
            return Exchange(gathered, again + backward + passes * scattered, 0.0)
        if not reduced:
            return Exchange(0.0, 0.0, 0.0)
        updated = seconds("all_gather", int(elements * weight_width(recipe)), shards, stride)
        return Exchange(0.0, backward + (passes if zero == 2 else 1) * scattered, updated)

    def _kept(self, split: ModelSplit, share: WorkShare, recompute: Recompute, compiled: bool) -> float:
        """Bytes that one layer keeps of one sequence, of the kind that keeps the least."""
        key = split.tp, split.cp, share.sp, share.cp_kind, share.ep > 1, recompute, compiled
        known = self._resting.get(key)
        if known is None:
            workload = replace(self._workload(one_sequence(split, share, recompute)), compile=compiled)
            blocks = micro_batch_bytes(workload).blocks.values()
            known = self._resting[key] = min(block.resting for block in blocks)
        return known

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

    def on_first_rank(self, split: ModelSplit, share: WorkShare) -> tuple[Columns, Columns, Columns]:
        """Of the pipelines' first ranks, before they are shared out: trained parameters, bytes of all; layers."""
        key = split.tp, share.sp, split.pp, share.ep
        known = self._first.get(key)
        if known is None:
            rows = []
            for schedule, chunks in self.pipelines(split.pp).names:
                layout = layout_of(
                    tp=split.tp, sp=share.sp, pp=split.pp, schedule=schedule, chunks=chunks, ep=share.ep
                )
                here, workload = rank_parameters(layout, self.model, self.cut_by, 0), self._workload(layout)
                trained = float(trained_with_experts(workload, here))
                rows.append((trained, resting_bytes(workload, here, 1), here.layers))
            elements, resting, layers = np.array(rows, dtype=float).T
            known = self._first[key] = elements, resting, layers
        return known
