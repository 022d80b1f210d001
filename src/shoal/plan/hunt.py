"""Best-first search of the layout space: always expand the part that may hold the fastest layout.

A layout is decided step by step (``plan/space.py``). Whatever is undecided, ``plan/bounds.py`` says how long a step
takes at least and ``plan/room.py`` how much memory it needs at least. A part of the space that cannot fit is dropped
whole, another is split further, and a layout whose exact time comes out on top is better than all that is left.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from shoal.facts.layout import RECOMPUTES, Offload, Recompute
from shoal.facts.ledger import Ledger
from shoal.plan.bounds import Bounds
from shoal.plan.room import Room
from shoal.plan.space import (
    EVERYTHING,
    NOTHING,
    OFFLOADS,
    ON_NVME,
    Candidate,
    Order,
    Share,
    Space,
    Split,
    States,
    placed,
)
from shoal.predict.memory import ledger
from shoal.predict.question import Question
from shoal.predict.step import Step, step

# Work is counted in bounds of about 30 microseconds, and not in seconds: the same question has the same answer on
# every machine. So many go into pricing a new share, a whole layout, and its memory.
PRICED_SHARE = 4
PRICED = 15
COUNTED = 30
# What is offloaded to a host's memory; NVMe is asked where that has no room.
NEAR = tuple(offload for offload in OFFLOADS if offload not in ON_NVME.values())

# Degrees of tp, cp, pp, ep; what data ranks share; whether anything is offloaded.
Strategy = tuple[int, int, int, int, int, bool]


class Node(NamedTuple):
    """Some decisions; what is None is still open."""

    split: Split
    share: Share | None = None
    recompute: Recompute | None = None
    order: Order | None = None
    states: States | None = None
    offload: tuple[Offload, ...] = NOTHING


@dataclass(slots=True)
class Priced:
    """A whole layout with its exact time, and later its memory."""

    candidate: Candidate
    question: Question
    step: Step
    memory: Ledger | None = None

    @property
    def strategy(self) -> Strategy:
        split, share, _, states, _ = self.candidate
        return strategy_of(split, share, states)


@dataclass
class Hunt:
    """One search on its way."""

    asked: Question
    bounds: Bounds
    room: Room
    space: Space
    top: int
    evaluated: int = 0
    before: dict[Strategy, float] = field(default_factory=dict)  # strategies with a plan already: its time
    settled: set[Strategy] = field(default_factory=set)  # those that cannot get a better one
    at_best: float | None = None  # where it was broken off: what is left takes at least so long
    accepted: list[Priced] = field(default_factory=list)
    lost: list[Priced] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._heap: list[tuple[float, int, Node | Priced]] = []
        self._number = count()
        self._worked = 0
        self._offloaded: set[tuple[Split, Share, Order]] = set()
        self._further: set[tuple[object, ...]] = set()
        self._tried: set[tuple[object, ...]] = set()
        self._failed: dict[tuple[object, ...], int] = {}
        for split in self.space.splits():
            self._push(self.bounds.of_split(split), Node(split))

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
            elif item.share is None:
                self._open_split(item)
            elif item.recompute is None:
                self._open_share(item)
            elif item.order is None:
                self._open_recompute(item)
            elif item.states is None:
                self._open_order(item)
            else:
                self._price(item)

    def _enough(self) -> bool:
        """Whether so many strategies have plans that nothing that is left can be among the best."""
        if len(self.accepted) + len(self.before) < self.top:
            return False
        bound = self._heap[0][0]
        return len(self.accepted) + sum(seconds <= bound for seconds in self.before.values()) >= self.top

    def plans(self) -> dict[Strategy, float]:
        """The time of every strategy that has a plan by now."""
        return self.before | {one.strategy: one.step.seconds for one in self.accepted}

    def _push(self, bound: float, item: Node | Priced) -> None:
        self._worked += 1
        heapq.heappush(self._heap, (bound, next(self._number), item))

    def _open_split(self, node: Node) -> None:
        split, room = node.split, self.room
        least: dict[
            int, float | None
        ] = {}  # bytes that rest, with so many ranks for experts; None: it cannot fit
        for shares in self.space.shares_by_size(split):
            ep = shares[0].ep
            if ep not in least:
                needs = [room.of_split(split, ep, offload) for offload in (NOTHING, *self.space.offloads)]
                least[ep] = min((resting for resting, peak in needs if room.fits(split, peak)), default=None)
            resting = least[ep]
            if resting is None:
                continue
            fitting = bisect(
                shares, 0, key=lambda one: not room.fits(split, room.of_share(split, one, resting))
            )
            for share in shares[:fitting]:
                self._worked += PRICED_SHARE
                self._push(self.bounds.of_share(split, share), Node(split, share))

    def _open_share(self, node: Node) -> None:
        split, share = node.split, node.share
        assert share is not None
        for recompute in RECOMPUTES:
            self._push(self.bounds.of_share(split, share, recompute), Node(split, share, recompute))

    def _open_recompute(self, node: Node) -> None:
        split, share, recompute = node.split, node.share, node.recompute
        assert share is not None
        for order in self.space.orders(split, recompute):
            self._push(self.bounds.of_order(split, share, order), Node(split, share, recompute, order))

    def _open_order(self, node: Node) -> None:
        split, share, recompute, order, _, offload = node
        assert share is not None and order is not None
        self._worked += 2
        fits = self._may_hold(split, share, order, offload)
        for alike in self.space.sharings(split, share.ep, offload) if fits else ():
            if strategy_of(split, share, alike[0]) in self.settled:
                continue
            worked = None
            for states in alike:
                self._worked += 1
                if not self.room.holds(split, share, order, [states]):
                    fits = False
                    break  # over fewer ranks they need more
                if worked is None:
                    held = self.bounds.handled(split, share, states)
                    worked = self.bounds.of_order(split, share, order, held, played=True)
                bound = self.bounds.of_states(split, share, order, states, worked)
                self._push(bound, Node(split, share, recompute, order, states, offload))
        if not fits and not offload:
            self._offload(split, share, order)

    def _may_hold(self, split: Split, share: Share, order: Order, offload: tuple[Offload, ...]) -> bool:
        return self.room.holds(split, share, order, self.room.frugal(split, offload))

    def _offload(self, split: Split, share: Share, order: Order) -> None:
        """The same with something offloaded, which is not asked before something did not fit.

        It is never faster: a host updates at a small part of the rate of a device's own memory, and all else only adds.
        """
        if not self.space.offloads or (split, share, order) in self._offloaded:
            return
        self._offloaded.add((split, share, order))
        self._worked += 1
        if not self._may_hold(split, share, order, EVERYTHING):
            return
        worked = self.bounds.of_order(split, share, order)
        for offload in NEAR:
            if self._may_hold(split, share, order, offload):
                bound = self.bounds.of_offload(split, share, order, offload, worked)
                self._push(bound, Node(split, share, order.recompute, order, None, offload))

    def _price(self, node: Node) -> None:
        split, share, _, order, states, offload = node
        assert share is not None and order is not None and states is not None
        alike = alike_of(split, share, order, states)
        if strategy_of(split, share, states) in self.settled or states.fsdp <= self._failed.get(alike, 0):
            return
        if alike not in self._tried:
            self._tried.add(alike)
            most = split.data if placed(split, states).sharded.size > 1 else 1
            frugal = States(split.data // most, most, states.zero, offload)
            if not self._fits(self._priced(Candidate(split, share, order, frugal, 1))):
                return
        for unit in self.space.units(split, states):
            priced = self._priced(Candidate(split, share, order, states, unit))
            self._push(priced.step.seconds, priced)

    def _priced(self, candidate: Candidate) -> Priced:
        question = replace(self.asked, layout=candidate.layout())
        self.evaluated += 1
        self._worked += PRICED
        return Priced(candidate, question, step(question, self.bounds.on))

    def _decide(self, priced: Priced) -> None:
        """Nothing that is left is faster: if it fits, it is its strategy's best."""
        split, share, order, states, _ = priced.candidate
        strategy = priced.strategy
        if strategy in self.settled:
            self.lost.append(priced)
        elif states.fsdp > self._failed.get(alike_of(split, share, order, states), 0) and self._fits(priced):
            self.accepted.append(priced)
            self.before.pop(strategy, None)
            self.settled.add(strategy)
            self.settled.add((*strategy[:-1], True))

    def _fits(self, priced: Priced) -> bool:
        """If not, neither do states over fewer ranks, or larger units."""
        split, share, order, states, unit = priced.candidate
        self._worked += COUNTED
        priced.memory = ledger(priced.question)
        if priced.memory.fits:
            return True
        self.lost.append(priced)
        if unit == 1:
            alike = alike_of(split, share, order, states)
            self._failed[alike] = max(states.fsdp, self._failed.get(alike, 0))
        if not states.offload:
            self._offload(split, share, order)
        elif further := ON_NVME.get(states.offload):
            key = split, share, order, further
            if key not in self._further and priced.memory.host > priced.memory.host_capacity:
                self._further.add(key)
                bound = self.bounds.of_offload(
                    split, share, order, further, self.bounds.of_order(split, share, order)
                )
                self._push(bound, Node(split, share, order.recompute, order, None, further))
        return False


def strategy_of(split: Split, share: Share, states: States) -> Strategy:
    shared = states.zero if placed(split, states).sharded.size > 1 else 0
    return split.tp, split.cp, split.pp, share.ep, shared, bool(states.offload)


def alike_of(split: Split, share: Share, order: Order, states: States) -> tuple[object, ...]:
    """What is the same in layouts that differ only in how many ranks share states, and in units."""
    return split, share, order, strategy_of(split, share, states)[4], states.offload


def runs(candidate: Candidate) -> bool:
    return candidate.split.cp == candidate.share.ep == 1 and not candidate.states.offload
