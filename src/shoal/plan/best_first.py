"""Best-first search of the layout space: always expand the part that may hold the fastest layout.

A layout is decided step by step (``plan/space.py``). For a partly decided layout, ``plan/time_bound.py`` bounds the
step time and ``plan/memory_bound.py`` the memory from below. A part of the space that cannot fit is pruned whole,
others are split further, and a layout whose exact time reaches the top of the queue beats all that is left.
"""

from __future__ import annotations

import heapq
from bisect import bisect, bisect_left
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import NamedTuple

from shoal.facts.layout import Offload
from shoal.plan.more_offload import CHAINS, HEAVIER, Offloads
from shoal.plan.orders import MergedGroups, OrderGroup
from shoal.plan.space import (
    EVERYTHING,
    FRACTIONS,
    NOTHING,
    ON_NVME,
    Candidate,
    ModelSplit,
    PipelineOrder,
    RankWork,
    StateSharding,
    has_activations,
    placed,
)
from shoal.plan.walk import Priced, StrategyKey, Walk, strategy_of
from shoal.predict.time.layer import WeightTraffic
from shoal.predict.workload import Workload

# Effort spent on the best layouts of further strategies once the fastest layout is known.
OTHERS = 3000


class SearchNode(NamedTuple):
    """A partial decision; None marks what is open. ``alike``: shardings that differ only in their number of ranks."""

    group: OrderGroup
    split: ModelSplit
    share: RankWork
    order: PipelineOrder
    offload: tuple[Offload, ...] | None = None
    alike: tuple[StateSharding, ...] | None = None
    states: StateSharding | None = None


@dataclass(frozen=True, eq=False)
class HuntResult:
    """Intermediate result of a hunt: layouts that fit, layouts priced and beaten, and a lower bound for the rest."""

    accepted: list[Priced]
    lost: list[Priced]
    at_best: float | None


def received(found: HuntResult, asked: Workload) -> HuntResult:
    """A result from another process, rebased onto this process's equal workload."""
    for one in (*found.accepted, *found.lost):
        one.workload = replace(asked, layout=one.workload.layout)
    return found


@dataclass(eq=False)
class BestFirst(Walk):
    """One search in progress, over ``groups`` of orders and what each leaves open."""

    groups: MergedGroups
    top: int
    others: int = OTHERS  # effort for further strategies
    settled: set[StrategyKey] = field(default_factory=set)  # strategies whose best plan is known
    at_best: float | None = None  # if cut off: lower bound on the remaining layouts' step time
    accepted: list[Priced] = field(default_factory=list)
    lost: list[Priced] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offloaded: set[tuple[object, ...]] = set()
        self._tried: set[tuple[object, ...]] = set()
        self._nodes: dict[Candidate, SearchNode] = {}  # the node that each priced layout came from
        self._place = 0

    def run(self, effort: int | None) -> None:
        """Search until the fastest of all is known, or ``effort`` is used up (None: no limit); then, with a little
        more effort, find the best of further strategies. Calling it again continues.
        """
        self.at_best = None
        enough = inf if effort is None else self._spent + effort
        while not self.accepted and (bound := self._bound()) is not None:
            if self._spent >= enough:
                self.at_best = bound
                break
            self._next(bound)
        self._find_others()

    def _find_others(self) -> None:
        enough = self._spent + self.others
        while len(self.accepted) < self.top and self._spent < enough and (bound := self._bound()) is not None:
            self._next(bound)
        # Layouts that are priced and did not reach the top of the queue.
        for _, _, item in sorted(one for one in self._heap if isinstance(one[2], Priced)):
            if len(self.accepted) < self.top:
                self._decide(item)
        self._heap = [one for one in self._heap if not isinstance(one[2], Priced)]
        heapq.heapify(self._heap)
        self.accepted.sort(key=lambda one: one.step.seconds)

    @property
    def found(self) -> HuntResult:
        return HuntResult(self.accepted, self.lost, self.at_best)

    @property
    def _spent(self) -> int:
        return self._worked + self.groups.worked

    def _bound(self) -> float | None:
        """Lower bound on everything left; None if nothing is left."""
        top = self.groups.at(self._place)
        if top is None:
            return self._heap[0][0] if self._heap else None
        return min(top.seconds, self._heap[0][0]) if self._heap else top.seconds

    def _next(self, bound: float) -> None:
        """Expand the most promising entry."""
        top = self.groups.at(self._place)
        if top is not None and top.seconds <= bound:
            if top.group is not None:
                self._place += 1
                self._open_group(top.group)
            return
        if not self._heap:
            return
        _, _, item = heapq.heappop(self._heap)
        if isinstance(item, Priced):
            self._decide(item)
        elif isinstance(item, OrderGroup):
            self._open_orders(item, self._sending(item))
        elif item.states is not None:
            self._price(item, item.states)
        elif item.alike is not None:
            self._open_alike(item, item.alike)
        elif item.offload is not None:
            self._open_states(item)
        else:
            self._open_order(item)

    def _open_group(self, group: OrderGroup) -> None:
        """Open a group's orders if any of them may fit; defer it if that needs offloaded activations."""
        self._worked += 1
        if self._any_may_hold(group, NOTHING):
            self._open_orders(group, 0.0)
        elif self.space.offloads:
            recompute = group.orders[0].recompute
            if self._any_may_hold(group, EVERYTHING["none"]):
                self._open_orders(group, 0.0)
            elif recompute != "none" and self._any_may_hold(group, EVERYTHING[recompute]):
                self._push(group.seconds + self._sending(group), group)

    def _sending(self, group: OrderGroup) -> float:
        return self.bounds.of_sending(group.split, group.share, group.orders)

    def _open_orders(self, group: OrderGroup, more: float) -> None:
        """``more``: extra seconds of every order in the group."""
        for seconds, order in self.groups.ordered(group):
            node = SearchNode(group, group.split, group.share, order)
            heapq.heappush(self._heap, (seconds + more, next(self._number), node))

    def _any_may_hold(self, group: OrderGroup, offload: tuple[Offload, ...]) -> bool:
        return self.room.fits(
            group.split, self.room.of_orders(group.split, group.share, group.orders, offload)
        )

    def _open_order(self, node: SearchNode) -> None:
        self._worked += 1
        if self._any_may_hold(node.group, NOTHING) and self._may_hold(*node[1:4], NOTHING):
            self._open_states(node._replace(offload=NOTHING))
        else:
            self._offload_more(node, NOTHING, False)

    def _open_states(self, node: SearchNode) -> None:
        _, split, share, order, offload, _, _ = node
        known: dict[WeightTraffic, float] = {}
        for alike in self.space.sharings(split, share.ep, offload or NOTHING):
            if strategy_of(split, share, alike[0]) not in self.settled:
                held = self.bounds.handled(split, share, alike[0])
                if held not in known:
                    known[held] = self.bounds.of_order(split, share, order, held)
                bound = known[held] + node.group.of_stage(alike[0].zero)
                bound += self.bounds.of_update(split, share, order, alike[0].zero, offload or NOTHING)
                self._push(bound, node._replace(alike=tuple(alike)))

    def _open_alike(self, node: SearchNode, alike: tuple[StateSharding, ...]) -> None:
        _, split, share, order, offload, _, _ = node
        if strategy_of(split, share, alike[0]) in self.settled:
            return
        found = list(self._states(split, share, order, alike))
        for states, bound in found:
            self._push(bound, node._replace(states=states))
        if len(found) == len(alike):
            return
        self._offload_more(node, offload, not self.room.has_place(split, share, order, alike[-1]))

    def _offload_more(self, node: SearchNode, offload: Offloads | None, no_place: bool) -> None:
        """After something did not fit: offload more, or offload the same to NVMe if host memory is full."""
        if not offload:
            self._offload(node, *CHAINS)
            return
        if offload in HEAVIER:
            self._offload(node, HEAVIER[offload])
        if no_place and offload in ON_NVME:
            self._offload(node, (ON_NVME[offload],))

    def _offload(self, node: SearchNode, *chains: tuple[Offloads, ...]) -> None:
        """The same with something offloaded, taking from each chain the least that may fit; only tried after something
        did not fit.

        Offload is never faster: a host updates far slower than a device, and everything else only adds time.
        """
        group, split, share, order, *_ = node
        chains = tuple(one for one in chains if (split, share, order, one) not in self._offloaded)
        if not self.space.offloads or not chains:
            return
        self._offloaded.update((split, share, order, one) for one in chains)
        self._worked += 1
        most = EVERYTHING[order.recompute]
        if not self._any_may_hold(group, most) or not self._may_hold(split, share, order, most):
            return
        worked = self.bounds.of_order(split, share, order)
        for chain in chains:
            fitting = (
                offload
                for offload in chain
                if offload in self.space.offloads
                and has_activations(offload, order.recompute)
                and self._any_may_hold(group, offload)
                and self._may_hold(split, share, order, offload)
            )
            if offload := next(fitting, None):
                bound = self.bounds.of_offload(split, share, order, offload, worked)
                self._push(bound + group.exchanged, SearchNode(group, split, share, order, offload))

    def _price(self, node: SearchNode, states: StateSharding) -> None:
        _, split, share, order, *_ = node
        if strategy_of(split, share, states) in self.settled:
            return
        most = split.data if placed(split, states).sharded.size > 1 else 1
        frugal = states._replace(dp=split.data // most, fsdp=most)
        for unit in self.space.units(split, states):
            candidate = Candidate(split, share, order, states, unit)
            if not self.space.admits(candidate):
                continue
            alike = self._alike(candidate)
            if alike not in self._tried and not self._too_large(candidate) and self._tight(candidate, frugal):
                self._tried.add(alike)
                self._fits_or_offload(node, self._priced(candidate._replace(states=frugal)))
            if not self._too_large(candidate):
                priced = self._priced(candidate)
                self._nodes[candidate] = node
                self._push(priced.step.seconds, priced)

    def _decide(self, priced: Priced) -> None:
        """Nothing left is faster: if the layout fits, it is its strategy's best."""
        strategy = priced.strategy
        if strategy in self.settled:
            self.lost.append(priced)
        elif not self._too_large(priced.candidate) and self._fits_or_offload(
            self._nodes[priced.candidate], priced
        ):
            self.accepted.append(self._balanced(priced))
            self.settled |= {strategy, (*strategy[:-1], True)}

    def _balanced(self, priced: Priced) -> Priced:
        """The same with the fraction of offloaded optimizer at which it is fastest, and of equals the largest.

        A smaller fraction moves work from the host to the device; beyond the point where both finish together, no step
        gets faster.
        """
        candidate = priced.candidate
        offload = {part.what: part for part in candidate.states.offload}
        if "optimizer" not in offload:
            return priced
        if "params" in offload:
            # Weights whose transfers are hidden are as fast on the device, where the optimizer's fraction can be
            # smaller.
            kept = tuple(part for part in candidate.states.offload if part.what != "params")
            lighter = self._priced(candidate._replace(states=candidate.states._replace(offload=kept)))
            as_fast = lighter.step.seconds <= priced.step.seconds * (1 + 1e-9)
            if as_fast and self.space.admits(lighter.candidate) and self._known_to_fit(lighter):
                return self._balanced(lighter)
            return priced

        @cache
        def tried(fraction: float) -> Priced:
            part = offload["optimizer"].model_copy(update={"fraction": fraction})
            parts = tuple({**offload, "optimizer": part}.values())
            return self._priced(candidate._replace(states=candidate.states._replace(offload=parts)))

        def fits(fraction: float) -> bool:
            one = tried(fraction)
            return self.room.headroom.left_by(self._memory(one)) and self.space.admits(one.candidate)

        fitting = FRACTIONS[bisect_left(FRACTIONS, True, key=fits) :]
        if not fitting:
            return priced
        fastest = tried(fitting[0]).step.seconds
        same = bisect(fitting, False, key=lambda one: tried(one).step.seconds > fastest * (1 + 1e-9))
        found = tried(fitting[max(0, same - 1)])
        return found if found.step.seconds < priced.step.seconds else priced

    def _fits_or_offload(self, node: SearchNode, priced: Priced) -> bool:
        """Whether it fits; if not, queue it with more offloaded."""
        if self._fits(priced):
            return True
        self.lost.append(priced)
        memory = priced.memory or priced.too_much
        no_place = memory is not None and memory.host > memory.host_capacity
        self._offload_more(node, priced.candidate.states.offload, no_place)
        return False
