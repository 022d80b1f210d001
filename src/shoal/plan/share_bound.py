"""Lower bounds on step time before a pipeline's order is known: for a split, and for a work share.

Composed of per-layer costs (``plan/layer_bound.py``). Each leaves out what is still open or slow to compute: for a
split, latencies and everything but matrix products, attention and tensor ranks' exchange; for a share, data ranks'
exchange (``plan/exchange_bound.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from shoal.facts.layout import Recompute, accumulation, divisors
from shoal.facts.precision import compute_width
from shoal.plan.layer_bound import LayerBound
from shoal.plan.space import ModelSplit, PipelineOrder, RankWork
from shoal.predict.flops import matrix_parameters
from shoal.predict.time import host, layer
from shoal.predict.time.bubble import follows, idle


class Cuts(NamedTuple):
    """The ways to cut a pipeline: for each, its ranks' layers without and with experts."""

    cuts: frozenset[frozenset[tuple[int, int]]]
    fullest: int  # the least maximum of layers per rank over all ways
    most: int  # the greatest
    fewest: tuple[int, int]  # layers without and with experts that every rank has at least


@dataclass
class ShareBound(LayerBound):
    """Share bounds for one model on one cluster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._worked = cache(self._work_of_split)
        # A step waits for the slowest of all devices, and once for the host.
        self.behind = host.slowest(self.devices, self.on.rates.device.spread)
        self.once = host.at_least_once(self.on)
        self._moved: dict[tuple[int, int, int], float] = {}
        self._computed: dict[tuple[object, ...], float] = {}
        self._waits: dict[tuple[int, int, str, int, bool], float] = {}
        self._cut: dict[tuple[int, str, int], Cuts] = {}

    def of_split(
        self, split: ModelSplit, orders: Sequence[PipelineOrder] = (), micro: int | None = None
    ) -> float:
        """Products at the best rate, and tensor ranks' exchange as one message per layer; with ``orders`` to choose
        from, also how long pipeline ranks wait for one another, which depends on ``micro`` once that is known.
        """
        worked = self._worked(split)
        if split.pp == 1 or not orders:
            return worked
        # Smaller micro-batches give more of them to fill the pipeline.
        times = max(1, self.recipe.batch // split.data)
        ways = divisors(times) if micro is None else [accumulation(self.recipe.batch, split.data, micro)]
        return worked * min(self.fill(split.pp, some, orders, False) for some in ways)

    def fill(self, pp: int, times: int, orders: Sequence[PipelineOrder], played: bool = True) -> float:
        """A lower bound on a pipeline's time relative to its work."""
        return 1 + self._least_wait(pp, times, orders, played) * (pp - 1) / times if pp > 1 else 1.0

    def _work_of_split(self, split: ModelSplit) -> float:
        tokens = self.recipe.batch * self.recipe.seq // (split.data * split.cp)
        exchanged = tokens * self.model.hidden * compute_width(self.recipe)
        # Two reductions per layer forward and two backward; with sequence parallelism each is two halves, which a
        # library may run faster than the whole.
        whole, *halves = (
            self.on.links.seconds(op, exchanged, split.tp, 1)
            for op in ("all_reduce", "all_gather", "reduce_scatter")
        )
        summed = 4 * min(whole, sum(halves)) * (1 - self.stack.tensor_overlap)
        each = (self._products + self._attention) / self.devices
        worked = each + self.model.layers / split.pp * summed
        return worked + self.behind * each if split.pp == 1 else worked

    def of_tokens(self, split: ModelSplit, share: RankWork) -> float:
        """Every micro-batch reads all weights of a layer for each of its products, however few its tokens. Measured
        kernels may have read from a cache.
        """
        if self.measured:
            return 0.0
        key = split.tp, share.ep, share.micro * self.recipe.seq // split.cp
        known = self._moved.get(key)
        if known is None:
            known = self._moved[key] = self._moved_by_products(split, share)
        return self._micro_batches(split, share) * known

    def _moved_by_products(self, split: ModelSplit, share: RankWork) -> float:
        """Seconds of memory traffic per micro-batch."""
        seconds, body, kernels = 0.0, self.body(split.tp, share.sp), self.on.kernels
        for part in self._parts(split, share, layer.FREE, False):
            count = body.sparse if part.experts else body.dense
            shapes = layer.products(self.model, part, self.stack.joined)
            read = sum(one.parameters for one in shapes)
            written = sum(one.times * one.groups * one.rows * (one.inner + one.columns) for one in shapes)
            seconds += count * (2 if self.frozen else 3) * kernels.moved((read + written) * kernels.width)
        return seconds / self.on.faster

    def of_layers(self, split: ModelSplit, share: RankWork, compiled: bool) -> float:
        """All computation within layers, spread evenly over all devices."""
        sp, kind, ep, micro = share
        tokens = micro * self.recipe.seq // split.cp
        key = (
            split.tp,
            sp,
            ep,
            tokens,
            kind == "ring" and split.cp,
            compiled,
            self.on.counts_sequences and micro,
        )
        known = self._computed.get(key)
        if known is None:
            body, known = self.body(split.tp, sp), 0.0
            for part in self._parts(split, share, layer.FREE, compiled):
                one = self.on.layer(part)
                worked = one.forward + one.input + (0.0 if self.frozen else one.weight)
                known += (body.sparse if part.experts else body.dense) * worked
            self._computed[key] = known
        return self._micro_batches(split, share) * known

    def of_rate(self, split: ModelSplit, share: RankWork, compiled: bool) -> float:
        """All computation and exchange within layers, spread evenly over all devices, for any pipeline depth."""
        costs = self.costs(split, share, "none", self.least_held(split, share), compiled)
        (whole,) = self.kinds(1, 1, "1f1b")
        total = whole.dense * costs.dense + whole.sparse * costs.sparse + costs.ends(whole)
        return self._micro_batches(split, share) * total

    def _micro_batches(self, split: ModelSplit, share: RankWork) -> float:
        """Passes through the whole network per device."""
        return self.recipe.batch * split.tp * split.cp / (self.devices * share.micro)

    @cached_property
    def _attention(self) -> float:
        """Attention over a whole batch on one device; 0 if measured, because it then depends on its shape."""
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
            flops /= 2  # tokens spread unevenly over a rank's experts, and rows are rounded down
        return flops / self.on.fastest

    def of_share(
        self,
        split: ModelSplit,
        share: RankWork,
        recompute: Recompute = "none",
        orders: Sequence[PipelineOrder] = (),
        compiled: bool | None = None,
    ) -> float:
        """All computation and exchange within layers, spread evenly over the pipeline; with ``orders`` to choose from,
        also how long its ranks wait for the others. ``compiled``: None if the orders disagree.
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

    def _least_wait(self, pp: int, times: int, orders: Sequence[PipelineOrder], played: bool = True) -> float:
        """Waiting time per other rank, in units of one micro-batch there. ``played``: also for pipelines that never
        fill, which need a simulation of about a millisecond.
        """
        key = pp, times, orders[0].schedule, len(orders), played
        known = self._waits.get(key)
        if known is None:
            pipelines = dict.fromkeys((order.schedule, order.chunks) for order in orders)
            found = (
                idle(schedule, pp, chunks, times).work
                if played or follows(schedule, pp, chunks, times)
                else (pp - 1) / (3 * chunks)  # the minimum of any schedule
                for schedule, chunks in pipelines
            )
            known = self._waits[key] = min(min(found) / (pp - 1), float(times))
        return known
