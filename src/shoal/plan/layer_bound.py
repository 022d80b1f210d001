"""Lower bounds on a micro-batch's time on one rank, layer by layer: priced once, and shared by all step-time bounds.

Weight traffic besides products is added separately, since it changes with the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from shoal.facts.config import Lora, TuneSection
from shoal.facts.layout import Layout, Recompute, Schedule, accumulation
from shoal.plan.space import (
    ModelSplit,
    PipelineOrder,
    RankWork,
    StateSharding,
    layout_of,
    placed,
)
from shoal.plan.within_bound import WithinBound
from shoal.predict.rank_parameters import (
    RankParameters,
    rank_parameters,
)
from shoal.predict.time import layer
from shoal.predict.time.layer import Passes, Seconds, WeightTraffic
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.step import (
    CostModel,
    RankKind,
    rests,
    stage_kinds,
)
from shoal.predict.workload import Workload


class Costs(NamedTuple):
    """Seconds of one micro-batch, for a rank's share."""

    dense: float  # per layer, forward and backward, with recomputation and exchanges within the layer
    sparse: float  # per layer with experts
    first: Seconds  # the embedding
    last: Seconds  # the head and the loss
    dense_computed: float  # the same layers without exchange
    sparse_computed: float
    forward: float  # the slower kind of layer, without exchange
    backward: float

    def ends(self, kind: RankKind) -> float:
        """A rank's part of the embedding and the head; weight gradients are counted with input gradients."""
        first, last = self.first, self.last
        return (first.forward + first.input if kind.first else 0.0) + (
            last.forward + last.input if kind.last else 0.0
        )


@dataclass
class LayerBound:
    """Layer bounds for one model on one cluster."""

    on: CostModel
    tune: TuneSection
    lora: Lora | None
    devices: int
    compile: bool | None = None

    def __post_init__(self) -> None:
        self.model, self.recipe, self.stack = self.on.model, self.on.recipe, self.on.stack
        # Cached by what each result depends on, instead of by the model, which is slow to hash.
        self.kinds = cache(self._stage_kinds)
        self.expert_parts = cache(self._expert_parts)
        self.body = cache(self._all_layers)
        self._compiles = cache(self._compiled_blocks)
        self._least_held = cache(self._least_handled)
        self.moving = cache(self._moved_beside)
        self.measured = isinstance(self.on.kernels, MeasuredKernels)
        # Frozen weights have no gradients; if some are frozen, the gradients of the others are ignored.
        self.frozen = self.lora is not None or self.recipe.freezes
        self.cut_by = None if self.stack.even_stages else self.recipe.seq
        self.within = WithinBound(self.on, self._workload(Layout()), self.body)
        self._costs: dict[tuple[object, ...], Costs] = {}

    def least_held(self, split: ModelSplit, share: RankWork) -> WeightTraffic:
        """A bound for any sharding: in a pipeline gradients never accumulate as shards."""
        if split.pp == 1:
            return layer.FREE
        return self._least_held(accumulation(self.recipe.batch, split.data, share.micro))

    def _least_handled(self, times: int) -> WeightTraffic:
        least = Passes(*map(min, self.on.handling("whole", times), self.on.handling("kept", times)))
        return WeightTraffic(least, least)

    def handled(self, split: ModelSplit, share: RankWork, states: StateSharding) -> WeightTraffic:
        """A lower bound, also for experts on fewer ranks than here."""
        times = accumulation(self.recipe.batch, split.data, share.micro)
        # A single device that processes the whole batch at once widens no gradient.
        alone = split.data * split.tp * split.cp * split.pp == 1
        found = []
        for ep in (1, share.ep):
            sharded = states.zero == 3 and placed(split, states, ep).sharded.size > 1
            found.append(self.on.handling(rests(sharded, split.pp), times, narrow=alone and times == 1))
        dense, routed = found
        if self.model.experts is None:
            return WeightTraffic(dense, dense)
        whole = self.on.handling("whole", times, narrow=alone and times == 1)
        return WeightTraffic(dense, Passes(*map(min, routed, whole)))

    def costs(
        self,
        split: ModelSplit,
        share: RankWork,
        recompute: Recompute,
        held: WeightTraffic,
        compiled: bool | None = None,
    ) -> Costs:
        """``compiled``: None while the schedule is open; then blocks are assumed compiled if any schedule allows it."""
        compiled = self.compiled(split, None) if compiled is None else compiled
        # Weight traffic is added separately, since it changes with the number of micro-batches; with measured kernels,
        # it is measured as well.
        within = held if self.measured else layer.FREE
        key = (split.tp, split.cp, *share, recompute, within, compiled)
        known = self._costs.get(key)
        if known is None:
            known = self._costs[key] = self._priced(split, share, recompute, within, compiled)
        return known if within == held else self._holding(known, split, share, recompute, held)

    def _holding(
        self, costs: Costs, split: ModelSplit, share: RankWork, recompute: Recompute, held: WeightTraffic
    ) -> Costs:
        """Costs including the traffic of weights and their gradients."""
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

    def _moved_beside(self, tp: int, ep: int, held: WeightTraffic) -> list[Passes]:
        """Seconds besides products: for a layer without experts, one with them, and the head."""
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
        """Parameters of a layer without and of one with experts: without routed experts, and those alone."""
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
        self, split: ModelSplit, share: RankWork, recompute: Recompute, held: WeightTraffic, compiled: bool
    ) -> Costs:
        """One micro-batch on one rank."""
        tokens, model = share.micro * self.recipe.seq // split.cp, self.model
        body = self.body(split.tp, share.sp)
        decided = split, share, recompute, compiled
        within = self.within.of_tensor(*decided, tokens)
        seconds, computed, forwards, backwards = [0.0, 0.0], [0.0, 0.0], [0.0], [0.0]
        for part in self._parts(split, share, held, compiled):
            place, count = (1, body.sparse) if part.experts else (0, body.dense)
            one = self.on.layer(part)
            again = one.full if recompute == "full" else one.again if recompute == "selective" else 0.0
            backward = one.input + (0.0 if self.frozen else one.weight) + again
            computed[place] = one.forward + backward
            seconds[place] = computed[place] + within + self.within.of_context(*decided, part)
            if place:
                seconds[place] += self.within.of_experts(*decided, part) / count
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
        self, split: ModelSplit, share: RankWork, held: WeightTraffic, compiled: bool
    ) -> Iterator[layer.LayerShare]:
        """A rank's share of a layer, for each kind of layer present."""
        body = self.body(split.tp, share.sp)
        tokens = share.micro * self.recipe.seq // split.cp
        between = tokens / split.tp if share.sp else float(tokens)
        turns = split.cp if share.cp_kind == "ring" else 1
        unpacks = self.lora is not None and self.lora.base == "nf4"
        adapted = () if self.lora is None else self.lora.targets_in(self.model)
        for routed, count in ((False, body.dense), (True, body.sparse)):
            if count:
                yield layer.LayerShare(
                    tokens, between, share.micro, self.recipe.seq, split.tp, share.ep, routed, held, compiled,
                    self.recipe.dropout > 0, turns, unpacks, adapted,
                    self.expert_parts(split.tp, share.ep) if routed else 1,
                )  # fmt: skip

    def _expert_parts(self, tp: int, ep: int) -> int:
        return self._workload(layout_of(dp=ep, tp=tp, ep=ep)).expert_parts

    def _stage_kinds(self, pp: int, chunks: int, schedule: str) -> tuple[RankKind, ...]:
        return stage_kinds(self.model, pp, chunks, schedule, self.cut_by)

    def _all_layers(self, tp: int, sp: bool) -> RankParameters:
        """All layers, without the ends."""
        whole = rank_parameters(layout_of(tp=tp, sp=sp), self.model, self.cut_by, 0)
        # With adapters the first block's backward pass stops early.
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
