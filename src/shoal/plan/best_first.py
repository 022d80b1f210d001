"""Best-first search of the layout space: always expand the part that may hold the fastest layout.

The space is cut into splits, these into blocks (``plan/block.py``). Whatever is undecided, ``plan/time_bound.py`` says
how long a step takes at least and ``plan/memory_bound.py`` how much memory it needs at least. What cannot fit, or
cannot be faster than what is known to fit, is dropped. A layout whose exact time comes out on top is better than all
that is left.
"""

from __future__ import annotations

import heapq
from bisect import bisect, bisect_left
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from math import inf
from typing import Any

from shoal.facts.ledger import Ledger
from shoal.plan.block import Block, Found
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.space import FRACTIONS, Candidate, ModelSplit, Space, StateSharding, WorkShare, placed
from shoal.plan.state_columns import StateTables
from shoal.plan.time_bound import TimeBound
from shoal.predict.memory import ledger
from shoal.predict.time.step import StepTime, step
from shoal.predict.workload import Workload

# Work is counted in bounds on orders, and not in seconds: the same workload has the same answer on every machine. So
# many go into a block, a whole layout, and its memory.
BOUNDED = 1500
PRICED = 6000
COUNTED = 15000
# Of a block, orders are opened together that take up to so much longer than the fastest may.
AHEAD = 1.1
# And of what is then found, so many are tried at once.
TRIED = 2

# Degrees of tp, cp, pp, ep; what data ranks share; whether anything is offloaded.
StrategyKey = tuple[int, int, int, int, int, bool]


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
class Prices:
    """What is known of layouts by now, for all hunts through a space."""

    asked: Workload
    bounds: TimeBound
    worked: int = 0
    evaluated: int = 0
    known: dict[Candidate, Priced] = field(default_factory=dict)
    _blocks: dict[tuple[ModelSplit, tuple[object, ...]], Block] = field(default_factory=dict)

    def blocks(self, space: Space, split: ModelSplit) -> list[Block]:
        found = []
        for shares in space.shares_by_size(split):
            key = split, (shares[0].sp, shares[0].cp_kind, shares[0].ep)
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = Block(split, shares, self.bounds, self.asked.recipe.batch)
                self.worked += BOUNDED + block.size
            found.append(block)
        return found

    def priced(self, candidate: Candidate) -> Priced:
        known = self.known.get(candidate)
        if known is None:
            workload = replace(self.asked, layout=candidate.layout())
            self.evaluated += 1
            self.worked += PRICED
            known = self.known[candidate] = Priced(candidate, workload, step(workload, self.bounds.on))
        return known

    def memory(self, priced: Priced) -> Ledger:
        if priced.memory is None:
            self.worked += COUNTED
            priced.memory = ledger(priced.workload)
        return priced.memory


@dataclass
class Walk:
    """What every way through the space has in common."""

    prices: Prices
    room: MemoryBound
    space: Space

    def __post_init__(self) -> None:
        self.lost: list[Priced] = []
        self.tables = StateTables(self.space)
        self._failed: dict[tuple[object, ...], int] = {}

    def fits(self, priced: Priced) -> bool:
        """If not, neither do states over fewer ranks, or larger units."""
        candidate, memory = priced.candidate, self.prices.memory(priced)
        fits = self.room.headroom.left_by(memory)
        if not fits:
            self.lost.append(priced)
            alike = self._alike(candidate)
            if alike[-1] == candidate.unit:
                self._failed[alike] = max(candidate.states.fsdp, self._failed.get(alike, 0))
        return fits

    def too_large(self, candidate: Candidate) -> bool:
        """Whether something that needs no more memory did not fit."""
        return candidate.states.fsdp <= self._failed.get(self._alike(candidate), 0)

    def _alike(self, candidate: Candidate) -> tuple[object, ...]:
        """What is the same in layouts that differ only in how many ranks share states, and in units. Last, of those the
        unit that needs the least memory; where small units stay gathered, each may. Experts that no other rank of a
        copy holds are gathered from nowhere, so over fewer ranks these may need less.
        """
        split, share, order, states, unit = candidate
        least = unit if self.prices.asked.tune.persist_below else 1
        ranks = states.fsdp if share.ep > 1 else 0
        return split, share, order, strategy_of(split, share, states)[4], states.offload, ranks, least


@dataclass
class BestFirst(Walk):
    """The fastest layout that fits, or that of each of several strategies (``top``)."""

    best: Priced | None = None
    top: int = 1
    at_best: float | None = None  # where it was broken off: what is left takes at least so long

    def __post_init__(self) -> None:
        super().__post_init__()
        self.found: dict[StrategyKey, Priced] = {}

    def run(self, effort: int | None, until: float = inf) -> Priced | None:
        """To the end, or until so much work is done; None: to the end. Nothing slower than ``until`` is asked for."""
        prices, number = self.prices, count()
        self._limit = until if self.best is None else min(until, self.best.step.seconds)
        enough = None if effort is None else prices.worked + effort
        heap: list[tuple[float, int, Any]] = []
        for split in self.space.splits():
            heap.append((prices.bounds.of_split(split), next(number), split))
        heapq.heapify(heap)
        while heap and heap[0][0] < self._limit and not self._settled(heap[0][0]):
            if enough is not None and prices.worked >= enough:
                self.at_best = heap[0][0]
                return self.best
            bound, _, item = heapq.heappop(heap)
            if isinstance(item, ModelSplit):
                for block in prices.blocks(self.space, item):
                    heapq.heappush(heap, (max(bound, block.least), next(number), (block, -inf)))
            elif isinstance(item[1], Found):
                block, found, place = item
                self._try(block, found, place)
                if place + 1 < len(found.seconds):
                    heapq.heappush(
                        heap, (float(found.seconds[place + 1]), next(number), (block, found, place + 1))
                    )
            else:
                self._open(heap, number, bound, *item)
        return self.best

    def _settled(self, bound: float) -> bool:
        """Whether what is left, which takes at least so long, cannot be among the ``top``."""
        return sum(one.step.seconds <= bound for one in self.found.values()) >= self.top

    def _open(
        self, heap: list[tuple[float, int, Any]], number: Any, bound: float, block: Block, after: float
    ) -> None:
        """The orders of a block that may take up to so many seconds, all that may be fast enough if that is known."""
        upto = min(self._limit, bound * AHEAD)
        orders = (block.seconds > after) & (block.seconds <= upto)
        found = block.open(orders, self.room, self.tables, self._limit)
        self.prices.worked += int(orders.sum())
        left = block.seconds[block.seconds > upto]
        if len(left):
            heapq.heappush(heap, (float(left.min()), next(number), (block, upto)))
        if found is None:
            return
        found = found.at(found.seconds.argsort(kind="stable"))
        self.prices.worked += len(found.seconds)
        place = 0
        if self._limit == inf:  # anything that fits says how much need not be looked at
            while place < min(TRIED, len(found.seconds)):
                self._try(block, found, place)
                place += 1
        if place < len(found.seconds):
            heapq.heappush(heap, (float(found.seconds[place]), next(number), (block, found, place)))

    def _try(self, block: Block, found: Found, place: int) -> None:
        """Layouts of all units."""
        least, bound = block.candidate(found, place, 1), float(found.seconds[place])
        strategy = strategy_of(least.split, least.share, least.states)
        # With something offloaded a strategy is another only where it does not fit without.
        known = [self.found[key] for key in (strategy, (*strategy[:-1], False)) if key in self.found]
        limit = min((self._limit, *(one.step.seconds for one in known)))
        if bound >= limit or self.too_large(least):
            return
        for unit in self.space.units(least.split, least.states):
            candidate = least._replace(unit=unit)
            if self.too_large(candidate):
                continue
            priced = self.prices.priced(candidate)
            if priced.step.seconds >= limit:
                continue
            if self.fits(priced):
                self.found[strategy], limit = priced, priced.step.seconds
                if self.best is None or limit < self.best.step.seconds:
                    self.best = priced
                if self.top == 1:
                    self._limit = limit
            elif unit == 1:
                return


def balanced(walk: Walk, priced: Priced) -> Priced:
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
        return walk.prices.priced(candidate._replace(states=candidate.states._replace(offload=parts)))

    def fits(fraction: float) -> bool:
        return walk.room.headroom.left_by(walk.prices.memory(tried(fraction)))

    fitting = FRACTIONS[bisect_left(FRACTIONS, True, key=fits) :]
    if not fitting:
        return priced
    fastest = tried(fitting[0]).step.seconds
    same = bisect(fitting, False, key=lambda one: tried(one).step.seconds > fastest * (1 + 1e-9))
    found = tried(fitting[max(0, same - 1)])
    return found if found.step.seconds < priced.step.seconds else priced


def strategy_of(split: ModelSplit, share: WorkShare, states: StateSharding) -> StrategyKey:
    shared = states.zero if placed(split, states).sharded.size > 1 else 0
    return split.tp, split.cp, split.pp, share.ep, shared, bool(states.offload)
