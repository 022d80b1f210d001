"""Find the simplest layout that is fast enough, or the best founded: the space in another order.

What has the fewest parts is taken up first (``plan/complexity.py``); of as many parts, what rests on the best evidence;
of as good evidence, what has the fewest axes; and then the fastest. For the best founded, evidence comes before parts.
A decision adds parts or none, so the first whole layout that comes out on top, within the time and the memory that
there are, is simpler than all that is left.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from shoal.plan import complexity, evidence
from shoal.plan.best_first import Priced, Walk
from shoal.plan.block import Block, Found
from shoal.plan.space import ModelSplit, layout_of


class Complexity(NamedTuple):
    """What speaks against a layout, the weightiest first."""

    parts: int
    unmeasured: int  # claims that no published run supports
    keys: int  # plain replicas have no part, but a key to write: it decides where the rest is equal
    axes: int  # an axis is more than a policy: it has ranks of its own to place
    seconds: float


def rank_of(priced: Priced) -> Complexity:
    """Of a whole layout."""
    workload, candidate = priced.workload, priced.candidate
    return Complexity(
        complexity.count(candidate, workload.recipe.batch),
        len(evidence.unmeasured(workload)),
        complexity.replicas_alone(candidate.split, candidate.share, candidate.states),
        sum(degree > 1 for degree in workload.layout.degrees.values()),
        priced.step.seconds,
    )


@dataclass
class Simplest(Walk):
    """``limit``: seconds that a step may take. ``best``: a layout within it that fits, and is to be beaten.
    ``founded``: evidence comes first.
    """

    limit: float
    best: Priced
    founded: bool = False
    complete: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = self.prices.asked
        # The model, the device and the recipe are as well known whatever the layout.
        self._known = len(evidence.unmeasured(replace(asked, layout=layout_of(dp=self.space.devices))))

    def run(self, effort: int | None) -> Priced:
        """The simplest; where so much work does not suffice, the simplest so far."""
        prices, number = self.prices, count()
        enough = None if effort is None else prices.worked + effort
        heap: list[tuple[tuple[float, ...], int, Any]] = []
        for split in self.space.splits():
            if (bound := prices.bounds.of_split(split)) <= self.limit:
                first = self._key(complexity.of_split(split), self._known, 0, 0, bound)
                heap.append((first, next(number), split))
        heapq.heapify(heap)
        to_beat = self._rank(self.best)
        while heap and heap[0][0] < to_beat:
            if enough is not None and prices.worked >= enough:
                self.complete = False
                break
            _, _, item = heapq.heappop(heap)
            if isinstance(item, ModelSplit):
                for block in prices.blocks(self.space, item):
                    if block.least <= self.limit:
                        self._blocks(heap, number, block)
            elif isinstance(item[1], Found):
                block, found, keys, place, unit = item
                if unit == 1 and place + 1 < len(keys):
                    heapq.heappush(
                        heap, (tuple(keys[place + 1]), next(number), (block, found, keys, place + 1, 1))
                    )
                candidate = block.candidate(found, place, unit)
                if self.too_large(candidate):
                    continue
                priced = prices.priced(candidate)
                if priced.step.seconds > self.limit:
                    if unit == 1:
                        for larger in self.space.units(candidate.split, candidate.states)[1:]:
                            more = self._key(1, 0, 0, 0, 0.0)
                            key = tuple(a + b for a, b in zip(keys[place], more, strict=True))
                            heapq.heappush(heap, (key, next(number), (block, found, keys, place, larger)))
                elif (rank := self._rank(priced)) < to_beat and self.fits(priced):
                    self.best, to_beat = priced, rank
            else:
                self._open(heap, number, *item)
        return self.best

    def _blocks(self, heap: list[tuple[tuple[float, ...], int, Any]], number: Any, block: Block) -> None:
        """The orders of a block, by what speaks against them."""
        parts, doubts = block.of_orders
        fast = block.seconds <= self.limit
        kinds = {*zip(parts[fast].tolist(), doubts[fast].tolist(), strict=True)}
        for more, unsure in kinds:
            alike = fast & (parts == more) & (doubts == unsure)
            least = float(block.seconds[alike].min())
            key = self._key(block.parts + more, self._known + block.unmeasured + unsure, 0, block.axes, least)
            heapq.heappush(heap, (key, next(number), (block, alike)))

    def _open(
        self, heap: list[tuple[tuple[float, ...], int, Any]], number: Any, block: Block, orders: Any
    ) -> None:
        self.prices.worked += int(orders.sum())
        found = block.open(orders, self.room, self.tables, self.limit)
        if found is None:
            return
        self.prices.worked += len(found.seconds)
        counted = block.counted(found)
        keys = np.array(
            self._key(
                counted.parts, counted.unmeasured + self._known, counted.keys, counted.axes, found.seconds
            )
        )
        order = np.lexsort(keys[::-1])
        found, keys = found.at(order), keys[:, order].T
        heapq.heappush(heap, (tuple(keys[0]), next(number), (block, found, keys, 0, 1)))

    def _key(self, parts: Any, unmeasured: Any, keys: Any, axes: Any, seconds: Any) -> tuple[Any, ...]:
        first = (unmeasured, parts) if self.founded else (parts, unmeasured)
        return (*first, keys, axes, seconds)

    def _rank(self, priced: Priced) -> tuple[float, ...]:
        return self._key(*rank_of(priced))
