"""Best-first search of the layout space: always expand the part that may hold the fastest layout.

A layout is decided step by step (``plan/space.py``). Whatever is undecided, ``plan/time_bound.py`` says how long a step
takes at least and ``plan/memory_bound.py`` how much memory it needs at least. A part of the space that cannot fit is
dropped whole, another is split further, and a layout whose exact time comes out on top is better than all that is left.
"""

from __future__ import annotations

import heapq
from bisect import bisect, bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from math import inf
from typing import Any, NamedTuple

from shoal.facts.layout import RECOMPUTES, Offload, Recompute
from shoal.facts.ledger import Ledger
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.space import (
    EVERYTHING,
    FRACTIONS,
    NOTHING,
    OFFLOADS,
    ON_NVME,
    Candidate,
    ModelSplit,
    PipelineOrder,
    Space,
    StateSharding,
    WorkShare,
    has_activations,
    placed,
)
from shoal.plan.time_bound import TimeBound
from shoal.predict.memory import ledger
from shoal.predict.time.step import StepTime, step
from shoal.predict.workload import Workload

# Work is counted in bounds of about 30 microseconds, and not in seconds: the same workload has the same answer on
# every machine. So many go into pricing a new share, a whole layout, and its memory.
PRICED_SHARE = 4
PRICED = 15
COUNTED = 30
# What is offloaded to a host's memory; NVMe is asked where that has no room.
NEAR = tuple(offload for offload in OFFLOADS if offload not in ON_NVME.values())

# Degrees of tp, cp, pp, ep; what data ranks share; whether anything is offloaded.
StrategyKey = tuple[int, int, int, int, int, bool]


class SearchNode(NamedTuple):
    """Some decisions; what is None is still open."""

    split: ModelSplit
    share: WorkShare | None = None
    recompute: Recompute | None = None
    order: PipelineOrder | None = None
    states: StateSharding | None = None
    offload: tuple[Offload, ...] = NOTHING


@dataclass(slots=True)
class Priced:
    """A whole layout with its exact time, and later its memory."""

    candidate: Candidate
    workload: Workload
    step: StepTime
    memory: Ledger | None = None

    @property
    def strategy(self) -> StrategyKey:
        split, share, _, states, _ = self.candidate
        return strategy_of(split, share, states)


@dataclass
class Walk:
    """What every way through the space has in common: the queue of what comes next, and what may fit of it."""

    asked: Workload
    bounds: TimeBound
    room: MemoryBound
    space: Space

    def __post_init__(self) -> None:
        self.evaluated = 0
        self._heap: list[tuple[Any, int, Any]] = []
        self._number = count()
        self._worked = 0
        self._failed: dict[tuple[object, ...], int] = {}

    def _push(self, bound: Any, item: Any) -> None:
        self._worked += 1
        heapq.heappush(self._heap, (bound, next(self._number), item))

    def _may_fit(
        self, split: ModelSplit, shares: list[WorkShare], offloads: Iterable[tuple[Offload, ...]]
    ) -> list[WorkShare]:
        """Of shares that differ only in the micro-batch: what rests may fit, and a backward pass beside it."""
        room = self.room
        needs = [room.of_split(split, shares[0].ep, offload) for offload in offloads]
        resting = min((rest for rest, peak in needs if room.fits(split, peak)), default=inf)
        fitting = bisect(shares, 0, key=lambda one: not room.fits(split, room.of_share(split, one, resting)))
        self._worked += PRICED_SHARE * fitting
        return shares[:fitting]

    def _states(
        self, split: ModelSplit, share: WorkShare, order: PipelineOrder, alike: list[StateSharding]
    ) -> Iterator[tuple[StateSharding, float]]:
        """Those that may fit, each with how long a step takes at least. Over fewer ranks they need more."""
        held = self.bounds.handled(split, share, alike[0])
        worked = None
        for states in alike:
            self._worked += 1
            if not self.room.holds(split, share, order, [states]):
                return
            if worked is None:
                worked = self.bounds.of_order(split, share, order, held, played=True)
            yield states, self.bounds.of_states(split, share, order, states, worked)

    def _may_hold(
        self, split: ModelSplit, share: WorkShare, order: PipelineOrder, offload: tuple[Offload, ...]
    ) -> bool:
        return self.room.holds(split, share, order, self.room.frugal(split, offload))

    def _priced(self, candidate: Candidate) -> Priced:
        workload = replace(self.asked, layout=candidate.layout())
        self.evaluated += 1
        self._worked += PRICED
        return Priced(candidate, workload, step(workload, self.bounds.on))

    def _too_large(self, candidate: Candidate) -> bool:
        """Whether something that needs no more memory did not fit."""
        return candidate.states.fsdp <= self._failed.get(self._alike(candidate), 0)

    def _fits(self, priced: Priced) -> bool:
        """If not, neither do states over fewer ranks, or larger units."""
        candidate = priced.candidate
        self._worked += COUNTED
        priced.memory = ledger(priced.workload)
        alike = self._alike(candidate)
        fits = self.room.headroom.left_by(priced.memory)
        if not fits and alike[-1] == candidate.unit:
            self._failed[alike] = max(candidate.states.fsdp, self._failed.get(alike, 0))
        return fits

    def _alike(self, candidate: Candidate) -> tuple[object, ...]:
        """What is the same in layouts that differ only in how many ranks share states, and in units. Last, of those the
        unit that needs the least memory; where small units stay gathered, each may. Experts that no other rank of a
        copy holds are gathered from nowhere, so over fewer ranks these may need less.
        """
        split, share, order, states, unit = candidate
        least = unit if self.asked.tune.persist_below else 1
        ranks = states.fsdp if share.ep > 1 else 0
        return split, share, order, strategy_of(split, share, states)[4], states.offload, ranks, least


@dataclass
class BestFirst(Walk):
    """One search on its way."""

    top: int
    before: dict[StrategyKey, float] = field(default_factory=dict)  # strategies with a plan already: its time
    settled: set[StrategyKey] = field(default_factory=set)  # those that cannot get a better one
    at_best: float | None = None  # where it was broken off: what is left takes at least so long
    accepted: list[Priced] = field(default_factory=list)
    lost: list[Priced] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offloaded: set[tuple[object, ...]] = set()
        self._tried: set[tuple[object, ...]] = set()
        for split in self.space.splits():
            self._push(self.bounds.of_split(split), SearchNode(split))

    def run(self, effort: int | None, until_one_fits: bool = False) -> None:
        """To the end, or until so much work is done; None: to the end. It can be called again, and goes on."""
        self.at_best = None
        enough = None if effort is None else self._worked + effort
        while self._heap and not self._enough():
            if (enough is not None and self._worked >= enough) or (until_one_fits and self.accepted):
                self.at_best = self._heap[0][0]
                return
            _, _, item = heapq.heappop(self._heap)
            if isinstance(item, Priced):
                self._decide(item)
            else:
                self._open(item)

    def _enough(self) -> bool:
        """Whether so many strategies have plans that nothing that is left can be among the best."""
        if len(self.accepted) + len(self.before) < self.top:
            return False
        bound: float = self._heap[0][0]
        return len(self.accepted) + sum(seconds <= bound for seconds in self.before.values()) >= self.top

    def plans(self) -> dict[StrategyKey, float]:
        """The time of every strategy that has a plan by now."""
        return self.before | {one.strategy: one.step.seconds for one in self.accepted}

    def _open(self, node: SearchNode) -> None:
        """One more decision."""
        split, share, recompute, order, states, _ = node
        if share is None:
            for shares in self.space.shares_by_size(split):
                for one in self._may_fit(split, shares, (NOTHING, *self.space.offloads)):
                    self._push(self.bounds.of_share(split, one), SearchNode(split, one))
        elif recompute is None:
            for again in RECOMPUTES:
                self._push(self.bounds.of_share(split, share, again), SearchNode(split, share, again))
        elif order is None:
            for each in self.space.orders(split, recompute):
                self._push(
                    self.bounds.of_order(split, share, each), SearchNode(split, share, recompute, each)
                )
        elif states is None:
            self._open_order(node, share, order)
        else:
            self._price(split, share, order, states)

    def _open_order(self, node: SearchNode, share: WorkShare, order: PipelineOrder) -> None:
        split, offload = node.split, node.offload
        self._worked += 2
        fits = self._may_hold(split, share, order, offload)
        for alike in self.space.sharings(split, share.ep, offload) if fits else ():
            if strategy_of(split, share, alike[0]) in self.settled:
                continue
            found = list(self._states(split, share, order, alike))
            for states, bound in found:
                self._push(bound, node._replace(states=states))
            fits = fits and len(found) == len(alike)
        if not fits and not offload:
            self._offload(split, share, order, NEAR)

    def _offload(
        self, split: ModelSplit, share: WorkShare, order: PipelineOrder, ways: tuple[tuple[Offload, ...], ...]
    ) -> None:
        """The same with something offloaded, which is not asked before something did not fit.

        It is never faster: a host updates at a small part of the rate of a device's own memory, and all else only adds.
        """
        key = split, share, order, ways
        known = self.space.offloads
        if not known or key in self._offloaded:
            return
        self._offloaded.add(key)
        self._worked += 1
        if not self._may_hold(split, share, order, EVERYTHING):
            return
        worked = self.bounds.of_order(split, share, order)
        for offload in ways:
            if offload not in known or not has_activations(offload, order.recompute):
                continue
            if self._may_hold(split, share, order, offload):
                bound = self.bounds.of_offload(split, share, order, offload, worked)
                self._push(bound, SearchNode(split, share, order.recompute, order, None, offload))

    def _price(
        self, split: ModelSplit, share: WorkShare, order: PipelineOrder, states: StateSharding
    ) -> None:
        if strategy_of(split, share, states) in self.settled:
            return
        most = split.data if placed(split, states).sharded.size > 1 else 1
        frugal = states._replace(dp=split.data // most, fsdp=most)
        for unit in self.space.units(split, states):
            candidate = Candidate(split, share, order, states, unit)
            if not self.space.admits(candidate):
                continue
            alike = self._alike(candidate)
            if alike not in self._tried and not self._too_large(candidate):
                self._tried.add(alike)
                self._fits(self._priced(candidate._replace(states=frugal)))
            if not self._too_large(candidate):
                priced = self._priced(candidate)
                self._push(priced.step.seconds, priced)

    def _decide(self, priced: Priced) -> None:
        """Nothing that is left is faster: if it fits, it is its strategy's best."""
        strategy = priced.strategy
        if strategy in self.settled:
            self.lost.append(priced)
        elif not self._too_large(priced.candidate) and self._fits(priced):
            self.accepted.append(self._balanced(priced))
            self.before.pop(strategy, None)
            self.settled |= {strategy, (*strategy[:-1], True)}

    def _balanced(self, priced: Priced) -> Priced:
        """The same with the fraction of its optimizer offloaded with which it is fastest, and of those the largest.

        A smaller one leaves less to the host and more on the device, and from where both are done together on no step
        gets faster.
        """
        candidate = priced.candidate
        offload = {part.what: part for part in candidate.states.offload}
        if "optimizer" not in offload or "params" in offload:
            return priced

        @cache
        def tried(fraction: float) -> Priced:
            part = offload["optimizer"].model_copy(update={"fraction": fraction})
            parts = tuple({**offload, "optimizer": part}.values())
            one = self._priced(candidate._replace(states=candidate.states._replace(offload=parts)))
            self._worked += COUNTED
            one.memory = ledger(one.workload)
            return one

        def fits(fraction: float) -> bool:
            candidate, memory = tried(fraction).candidate, tried(fraction).memory
            return memory is not None and self.room.headroom.left_by(memory) and self.space.admits(candidate)

        fitting = FRACTIONS[bisect_left(FRACTIONS, True, key=fits) :]
        if not fitting:
            return priced
        fastest = tried(fitting[0]).step.seconds
        same = bisect(fitting, False, key=lambda one: tried(one).step.seconds > fastest * (1 + 1e-9))
        found = tried(fitting[max(0, same - 1)])
        return found if found.step.seconds < priced.step.seconds else priced

    def _fits(self, priced: Priced) -> bool:
        if super()._fits(priced):
            return True
        self.lost.append(priced)
        split, share, order, states, _ = priced.candidate
        memory = priced.memory
        if not states.offload:
            self._offload(split, share, order, NEAR)
        elif states.offload in ON_NVME and memory is not None and memory.host > memory.host_capacity:
            self._offload(split, share, order, (ON_NVME[states.offload],))
        return False


def strategy_of(split: ModelSplit, share: WorkShare, states: StateSharding) -> StrategyKey:
    shared = states.zero if placed(split, states).sharded.size > 1 else 0
    return split.tp, split.cp, split.pp, share.ep, shared, bool(states.offload)
