"""Best first through the space of layouts: always the part that may hold the fastest is taken up next.

A layout is decided step by step (``plan/space.py``). Whatever is undecided, ``plan/bounds.py`` says how long a step
takes at least and ``plan/room.py`` how much memory it needs at least. A part of the space that cannot fit is dropped
whole, another is split further, and a layout whose exact time comes out on top is better than all that is left.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import count

from shoal.facts.layout import Offload
from shoal.facts.ledger import Ledger
from shoal.plan.bounds import Bounds
from shoal.plan.room import Room
from shoal.plan.space import NOTHING, Candidate, Order, Share, Space, Split, States
from shoal.predict.memory import ledger
from shoal.predict.question import Question
from shoal.predict.step import Bench, Step, bench, step


@dataclass(frozen=True, slots=True)
class Node:
    """Some decisions; what is None is still open."""

    split: Split
    share: Share | None = None
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


Strategy = tuple[int, int, int, int, int, bool]


@dataclass
class Hunt:
    """One search on its way."""

    asked: Question
    space: Space
    top: int
    effort: int | None = None
    evaluated: int = 0
    accepted_before: list[float] = field(default_factory=list)  # times of plans that are there already
    at_best: float | None = None  # where it was broken off: what is left takes at least so long
    accepted: list[Priced] = field(default_factory=list)
    lost: list[Priced] = field(default_factory=list)

    def __post_init__(self) -> None:
        asked = self.asked
        self.on: Bench = bench(asked)
        self.bounds = Bounds(self.on, asked.tune, asked.lora, self.space.devices)
        self.room = Room(asked.model, asked.cluster, asked.recipe, asked.stack, asked.lora)
        self._heap: list[tuple[float, int, Node | Priced]] = []
        self._number = count()
        self._settled: set[Strategy] = set()
        self._offloaded: set[tuple[Split, Share, Order]] = set()
        self._failed: dict[tuple[object, ...], int] = {}

    def run(self) -> None:
        for split in self.space.splits():
            self._push(self.bounds.of_split(split), Node(split))
        steps = 0
        while self._heap and not self._enough():
            if self.effort is not None and steps >= self.effort:
                self.at_best = self._heap[0][0]
                return
            steps += 1
            _, _, item = heapq.heappop(self._heap)
            if isinstance(item, Priced):
                self._decide(item)
            elif item.share is None:
                self._open_split(item)
            elif item.order is None:
                self._open_share(item)
            elif item.states is None:
                self._open_order(item)
            else:
                self._price(item)

    def _enough(self) -> bool:
        """Whether so many plans are there that nothing that is left can be among the best."""
        bound = self._heap[0][0]
        return len(self.accepted) + sum(seconds <= bound for seconds in self.accepted_before) >= self.top

    def _push(self, bound: float, item: Node | Priced) -> None:
        heapq.heappush(self._heap, (bound, next(self._number), item))

    def _open_split(self, node: Node) -> None:
        split, room = node.split, self.room
        may_fit: dict[int, bool] = {}
        for share in self.space.shares(split):
            if share.ep not in may_fit:
                may_fit[share.ep] = any(
                    room.fits(split, room.of_split(split, share.ep, offload))
                    for offload in (NOTHING, *self.space.offloads)
                )
            if may_fit[share.ep]:
                self._push(self.bounds.of_share(split, share), Node(split, share))

    def _open_share(self, node: Node) -> None:
        split, share = node.split, node.share
        assert share is not None
        for order in self.space.orders(split):
            self._push(self.bounds.of_order(split, share, order), Node(split, share, order))

    def _open_order(self, node: Node) -> None:
        split, share, order = node.split, node.share, node.order
        assert share is not None and order is not None
        fits = self.room.fits(split, self.room.of_order(split, share, order, node.offload))
        for alike in self.space.sharings(split, node.offload) if fits else ():
            if strategy_of(split, share, alike[0]) in self._settled:
                continue
            worked = None
            for states in alike:
                if not self.room.fits(split, self.room.of_states(split, share, order, states)):
                    fits = False
                    break  # over fewer ranks they need more
                if worked is None:
                    held = self.bounds.handled(split, share, states)
                    worked = self.bounds.of_order(split, share, order, held, played=True)
                bound = self.bounds.of_states(split, share, order, states, worked)
                self._push(bound, Node(split, share, order, states, node.offload))
        if not fits and not node.offload:
            self._offload(split, share, order)

    def _offload(self, split: Split, share: Share, order: Order) -> None:
        """The same with something offloaded, which is not asked before something did not fit.

        It is never faster: a host updates at a small part of the rate of a device's own memory, and all else only adds.
        """
        if (split, share, order) in self._offloaded:
            return
        self._offloaded.add((split, share, order))
        worked = self.bounds.of_order(split, share, order)
        for offload in self.space.offloads:
            if self.room.fits(split, self.room.of_order(split, share, order, offload)):
                bound = self.bounds.of_offload(split, share, order, offload, worked)
                self._push(bound, Node(split, share, order, None, offload))

    def _price(self, node: Node) -> None:
        split, share, order, states = node.split, node.share, node.order, node.states
        assert share is not None and order is not None and states is not None
        if strategy_of(split, share, states) in self._settled:
            return
        for unit in self.space.units(split, states):
            candidate = Candidate(split, share, order, states, unit)
            question = replace(self.asked, layout=candidate.layout())
            self.evaluated += 1
            spent = step(question, self.on)
            self._push(spent.seconds, Priced(candidate, question, spent))

    def _decide(self, priced: Priced) -> None:
        """Nothing that is left is faster: if it fits, it is its strategy's best."""
        split, share, order, states, unit = priced.candidate
        strategy = strategy_of(split, share, states)
        if strategy in self._settled:
            self.lost.append(priced)
            return
        # States over fewer ranks need more memory, and so do larger units.
        alike = split, share, order, strategy[4], states.offload
        if states.fsdp <= self._failed.get(alike, 0):
            return
        priced.memory = ledger(priced.question)
        if priced.memory.fits:
            self.accepted.append(priced)
            self._settled.add(strategy)
            self._settled.add((*strategy[:-1], True))
            return
        self.lost.append(priced)
        if unit == 1:
            self._failed[alike] = max(states.fsdp, self._failed.get(alike, 0))
        if not states.offload:
            self._offload(split, share, order)


def strategy_of(split: Split, share: Share, states: States) -> Strategy:
    shared = states.zero if states.fsdp * split.cp > 1 else 0
    return split.tp, split.cp, split.pp, share.ep, shared, bool(states.offload)


def runs(candidate: Candidate) -> bool:
    return candidate.split.cp == candidate.share.ep == 1 and not candidate.states.offload
