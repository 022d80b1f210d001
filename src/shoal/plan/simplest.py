"""Find the simplest layout that is fast enough: ``plan/best_first.py`` in another order.

Layouts with the fewest parts come first (``plan/complexity.py``); then those that follow published practice, then
those that split the model or a sequence along the fewest axes, then those with the best evidence, the fewest axes, and
the lowest time. Each decision adds parts or none, so the first whole layout that reaches the top, within the time and
memory limits, is simpler than all that is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.facts.schedules.programs import SPLIT_BACKWARD
from shoal.plan import complexity, evidence, practice
from shoal.plan.headroom import out_of_memory
from shoal.plan.orders import PRICED_SHARE, may_fit
from shoal.plan.space import (
    NOTHING,
    Candidate,
    ModelSplit,
    PipelineOrder,
    RankWork,
    StateSharding,
    has_activations,
    layout_of,
    placed,
)
from shoal.plan.walk import Priced, Walk

# Of two layouts that differ only in time, by at most this ratio, the one further from full memory wins: one with at
# most this probability of running out.
SLACK, AT_THE_EDGE = 1.03, 1e-5
# The default micro-batch depends on whether the stages run down the ranks, or down and back.
FILLING, FOLDED = PipelineOrder("1f1b", 1, "none"), PipelineOrder("zbv", 2, "none")


class Complexity(NamedTuple):
    """What counts against a layout, most important first."""

    parts: int
    departures: int  # of these, departures from the practice of published runs
    cuts: int  # axes that split the model or a sequence, which data ranks leave whole
    unmeasured: int  # claims that no published run supports
    keys: int  # plain replicas are not a part, but have a key to write: a tie-break
    axes: int  # an axis costs more than a policy: its ranks must be placed
    seconds: float

    def more(
        self, parts: int, unmeasured: int, seconds: float, keys: int = 0, axes: int = 0, departures: int = 0
    ) -> Complexity:
        """After one more decision."""
        return Complexity(
            self.parts + parts,
            self.departures + departures,
            self.cuts,
            self.unmeasured + unmeasured,
            self.keys + keys,
            self.axes + axes,
            seconds,
        )


class SimplestNode(NamedTuple):
    """A partial decision; None marks what is open."""

    split: ModelSplit
    share: RankWork | None = None
    few: int = 0  # next decisions that add this many parts; those that add more come later
    order: PipelineOrder | None = None
    states: StateSharding | None = None
    unit: int = 1


def rank_of(priced: Priced) -> Complexity:
    """The complexity of a whole layout."""
    workload, candidate = priced.workload, priced.candidate
    return Complexity(
        complexity.count(candidate, workload),
        len(practice.departures(workload)),
        _cuts(candidate.split),
        len(evidence.unmeasured(workload)),
        complexity.replicas_alone(candidate.split, candidate.share, candidate.states),
        sum(degree > 1 for degree in workload.layout.degrees.values()),
        priced.step.seconds,
    )


@dataclass(eq=False)
class Simplest(Walk):
    """``limit``: maximum seconds per step. ``best``: a layout within it that fits, to be beaten."""

    limit: float
    best: Priced
    complete: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._to_beat = rank_of(self.best)
        self._orders: dict[tuple[int, bool, bool], dict[int, list[PipelineOrder]]] = {}
        # Offload only as it is known to fit, or less: if more is needed, that is another search.
        away = self.best.candidate.states.offload
        known_to_fit = {part.what for part in away}
        less = [one for one in self.space.offloads if {part.what for part in one} < known_to_fit]
        self._offloads = dict.fromkeys((NOTHING, *less, away))
        # The evidence for model, device and recipe is the same in every layout.
        known = evidence.unmeasured(replace(self.asked, layout=layout_of(dp=self.space.devices)))
        for split in self.space.splits():
            bound = self.bounds.of_split(split, self.space.orders(split))
            axes = sum(degree > 1 for degree in split)
            where = split, self.asked.model, self.asked.cluster, self.asked.recipe.seq
            parts, departs = complexity.of_split(*where), practice.of_split(*where)
            self._push(
                Complexity(parts, departs, _cuts(split), len(known), 0, axes, bound), SimplestNode(split)
            )

    def run(self, effort: int | None) -> Priced:
        """The simplest; if ``effort`` runs out, the given ``best``. Among layouts with nearly equal time, one that is
        not close to running out of memory.
        """
        found: tuple[Complexity, Priced] | None = None
        while self._heap:
            if effort is not None and self._worked >= effort:
                self.complete = False
                break
            rank, _, item = heapq.heappop(self._heap)
            if found is not None and (rank[:-1] > found[0][:-1] or rank.seconds > SLACK * found[0].seconds):
                break
            if not isinstance(item, Priced):
                self._open(rank, item)
            elif not self._too_large(item.candidate) and self._fits(item):
                if found is None:
                    found = rank, item
                if not self._at_the_edge(item):
                    return item
        return found[1] if found else self.best

    def _at_the_edge(self, priced: Priced) -> bool:
        return out_of_memory(self._memory(priced)) > AT_THE_EDGE

    def _push(self, bound: Complexity, item: SimplestNode | Priced) -> None:
        if bound.seconds <= self.limit and bound < self._to_beat:
            super()._push(bound, item)
        else:
            self._worked += 1

    def _open(self, rank: Complexity, node: SimplestNode) -> None:
        """Make one more decision."""
        split, share, few, order, states, unit = node
        if share is None:
            self._open_split(rank, node)
        elif order is None:
            orders = self._orders_of(split, share)
            for each in orders[few]:
                alike = self.space.orders(split, each.recompute, each.schedule in SPLIT_BACKWARD)
                if not any(
                    self.room.fits(split, self.room.of_orders(split, share, alike, offload))
                    for offload in self._offloads
                    if has_activations(offload, each.recompute)
                ):
                    self._worked += 1
                    continue
                doubts = _doubts(evidence.of_order(split.pp, each.schedule, each.recompute))
                bound = self.bounds.of_order(split, share, each)
                compiled = self.bounds.compiled(split, each)
                bound += self.bounds.of_exchange(split, share, alike, compiled=compiled)
                departs = practice.of_order(split, each)
                self._push(rank.more(0, doubts, bound, departures=departs), node._replace(order=each))
            self._later(rank, node, orders)
        elif states is None:
            self._open_order(rank, node, share, order)
        elif self.space.admits(
            candidate := Candidate(split, share, order, states, unit)
        ) and not self._too_large(candidate):
            priced = self._priced(candidate)
            self._push(rank._replace(seconds=priced.step.seconds), priced)

    def _open_split(self, rank: Complexity, node: SimplestNode) -> None:
        split, model, cluster = node.split, self.asked.model, self.asked.cluster
        ways = list(self.space.shares_by_size(split))
        for shares in ways:
            first = shares[0]
            if complexity.of_share(split, first, model, cluster) != node.few:
                continue
            departs = practice.of_share(split, first, model, cluster)
            doubts = _doubts(evidence.of_share(split.cp, first.cp_kind, first.ep))
            fitting = may_fit(self.room, split, shares, self._offloads)
            self._worked += PRICED_SHARE * len(fitting)
            for share in fitting:
                orders = self.space.orders(split)
                bound = self.bounds.of_share(split, share, orders=orders)
                fewest = min(self._orders_of(split, share))
                routed = int(share.ep > 1)
                more = rank.more(fewest, doubts, bound, axes=routed, departures=departs)
                self._push(more, SimplestNode(split, share, fewest))
        self._later(rank, node, [complexity.of_share(split, shares[0], model, cluster) for shares in ways])

    def _later(self, rank: Complexity, node: SimplestNode, numbers: Iterable[int]) -> None:
        """Queue decisions that add more parts for later."""
        if further := [number for number in numbers if number > node.few]:
            more = min(further)
            self._push(rank.more(more - node.few, 0, rank.seconds), node._replace(few=more))

    def _orders_of(self, split: ModelSplit, share: RankWork) -> dict[int, list[PipelineOrder]]:
        """Orders grouped by the parts that they add."""
        batch = self.asked.recipe.batch
        usual = [share.micro == complexity.usual_micro(split, order, batch) for order in (FILLING, FOLDED)]
        key = split.pp, usual[0], usual[1]
        known = self._orders.get(key)
        if known is None:
            known = self._orders[key] = {}
            for order in self.space.orders(split):
                known.setdefault(complexity.of_order(split, share, order, batch), []).append(order)
        return known

    def _open_order(
        self, rank: Complexity, node: SimplestNode, share: RankWork, order: PipelineOrder
    ) -> None:
        split = node.split
        for offload in self._offloads:
            self._worked += 2
            if not has_activations(offload, order.recompute) or not self._may_hold(
                split, share, order, offload
            ):
                continue
            for alike in self.space.sharings(split, share.ep, offload):
                for states, bound in self._states(split, share, order, alike):
                    shards = placed(split, states).sharded.size
                    stack, cluster = self.asked.stack, self.asked.cluster
                    claimed = evidence.of_states(states.dp, shards, states.zero, states.offload, stack)
                    doubts = _doubts(claimed)
                    departs = practice.of_states(split, states, cluster)
                    added = complexity.of_states(split, share, states, stack) + departs
                    alone = complexity.replicas_alone(split, share, states)
                    both = int(states.dp > 1 and states.fsdp > 1)
                    for unit in self.space.units(split, states):
                        parts = added + complexity.of_unit(unit)
                        more = rank.more(parts, doubts, bound, alone, both, departures=departs)
                        self._push(more, node._replace(states=states, unit=unit))


def _cuts(split: ModelSplit) -> int:
    return (split.tp > 1) + (split.cp > 1) + (split.pp > 1)


def _doubts(claims: list[str]) -> int:
    return sum(claim not in evidence.ROWS for claim in claims)
