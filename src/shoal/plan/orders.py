"""The layouts of a space but for their states, in the order in which they may be fast.

All hunts through a space read one such list (``plan/best_first.py``), which grows as they do: a split, what a rank
works on at a time, what it computes again and in which order are as fast whatever headroom is asked for and whatever
waits elsewhere.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Iterable
from itertools import count
from math import inf
from typing import NamedTuple

from shoal.facts.layout import RECOMPUTES, Offload, Recompute
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.space import NOTHING, ModelSplit, PipelineOrder, Space, WorkShare
from shoal.plan.time_bound import TimeBound

# Pricing a new share takes as long as so many bounds.
PRICED_SHARE = 4


class Ordered(NamedTuple):
    """A split, a share and an order; a step in it takes at least so long."""

    seconds: float
    split: ModelSplit
    share: WorkShare
    order: PipelineOrder


class SharedDecisions(NamedTuple):
    """Some of these decisions; what is None is still open."""

    split: ModelSplit
    share: WorkShare | None = None
    recompute: Recompute | None = None


class Orders:
    """``room`` is that of the hunt that has the most of it."""

    def __init__(self, bounds: TimeBound, room: MemoryBound, space: Space) -> None:
        self.bounds, self.room, self.space = bounds, room, space
        self.worked = 0
        self._known: list[Ordered] = []
        self._heap: list[tuple[float, int, SharedDecisions | Ordered]] = []
        self._number = count()
        for split in space.splits():
            self._push(bounds.of_split(split), SharedDecisions(split))

    def at(self, place: int) -> Ordered | None:
        """The one at this place of the list; None beyond its end."""
        while len(self._known) <= place and self._heap:
            _, _, item = heapq.heappop(self._heap)
            if isinstance(item, Ordered):
                self._known.append(item)
            else:
                self._open(item)
        return self._known[place] if place < len(self._known) else None

    def _push(self, bound: float, item: SharedDecisions | Ordered) -> None:
        self.worked += 1
        heapq.heappush(self._heap, (bound, next(self._number), item))

    def _open(self, node: SharedDecisions) -> None:
        """One more decision."""
        split, share, recompute = node
        if share is None:
            for shares in self.space.shares_by_size(split):
                fitting = may_fit(self.room, split, shares, (NOTHING, *self.space.offloads))
                self.worked += PRICED_SHARE * len(fitting)
                for one in fitting:
                    self._push(self.bounds.of_share(split, one), SharedDecisions(split, one))
        elif recompute is None:
            for again in RECOMPUTES:
                self._push(self.bounds.of_share(split, share, again), SharedDecisions(split, share, again))
        else:
            for order in self.space.orders(split, recompute):
                seconds = self.bounds.of_order(split, share, order)
                self._push(seconds, Ordered(seconds, split, share, order))


def may_fit(
    room: MemoryBound, split: ModelSplit, shares: list[WorkShare], offloads: Iterable[tuple[Offload, ...]]
) -> list[WorkShare]:
    """Of shares that differ only in the micro-batch: what rests may fit, and a backward pass beside it."""
    needs = [room.of_split(split, shares[0].ep, offload) for offload in offloads]
    resting = min((rest for rest, peak in needs if room.fits(split, peak)), default=inf)
    fitting = bisect(shares, 0, key=lambda one: not room.fits(split, room.of_share(split, one, resting)))
    return shares[:fitting]
