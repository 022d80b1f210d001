"""The layouts of a space but for their states, in the order in which they may be fast.

All hunts through a space read one such list (``plan/best_first.py``), which grows as they do: a split, what a rank
works on at a time, what it computes again and in which order are as fast whatever headroom is asked for and whatever
waits elsewhere.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import inf

from shoal.facts.layout import RECOMPUTES, Offload, Recompute
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.space import NOTHING, ModelSplit, PipelineOrder, Space, WorkShare
from shoal.plan.time_bound import TimeBound

# Pricing a new share takes as long as so many bounds.
PRICED_SHARE = 4


@dataclass(eq=False)
class OrderGroup:
    """The orders of one share that compute the same again; a step takes at least ``seconds`` in any of them."""

    seconds: float
    split: ModelSplit
    share: WorkShare
    orders: list[PipelineOrder]
    bounds: TimeBound
    counted: bool = False  # whether someone has looked at them

    @cached_property
    def ordered(self) -> list[tuple[float, PipelineOrder]]:
        """Each with how long a step takes at least."""
        bound = self.bounds.of_order
        return [(bound(self.split, self.share, order), order) for order in self.orders]


@dataclass(frozen=True)
class OpenGroup:
    """Some of what makes a group; what is None is still open."""

    split: ModelSplit
    share: WorkShare | None = None
    recompute: Recompute | None = None


class OrderGroups:
    """``room`` is that of the hunt that has the most of it."""

    def __init__(self, bounds: TimeBound, room: MemoryBound, space: Space) -> None:
        self.bounds, self.room, self.space = bounds, room, space
        self.worked = 0
        self._known: list[OrderGroup] = []
        self._heap: list[tuple[float, int, OpenGroup]] = []
        self._number = count()
        for split in space.splits():
            self._push(bounds.of_split(split), OpenGroup(split))

    def at(self, place: int) -> OrderGroup | None:
        """The one at this place of the list; None beyond its end."""
        while len(self._known) <= place and self._heap:
            seconds, _, node = heapq.heappop(self._heap)
            if node.share is not None and node.recompute is not None:
                orders = self.space.orders(node.split, node.recompute)
                if orders:
                    self._known.append(OrderGroup(seconds, node.split, node.share, orders, self.bounds))
            else:
                self._open(node)
        return self._known[place] if place < len(self._known) else None

    def ordered(self, group: OrderGroup) -> list[tuple[float, PipelineOrder]]:
        """A group's orders, whose bounds are work for the first who asks."""
        self.worked += 0 if group.counted else len(group.orders)
        group.counted = True
        return group.ordered

    def _push(self, bound: float, node: OpenGroup) -> None:
        self.worked += 1
        heapq.heappush(self._heap, (bound, next(self._number), node))

    def _open(self, node: OpenGroup) -> None:
        """One more decision."""
        split, share = node.split, node.share
        if share is None:
            for shares in self.space.shares_by_size(split):
                fitting = may_fit(self.room, split, shares, (NOTHING, *self.space.offloads))
                self.worked += PRICED_SHARE * len(fitting)
                for one in fitting:
                    self._push(
                        self.bounds.of_share(split, one, orders=self.space.orders(split)),
                        OpenGroup(split, one),
                    )
            return
        for again in RECOMPUTES:
            bound = self.bounds.of_share(split, share, again, self.space.orders(split))
            self._push(bound, OpenGroup(split, share, again))


def may_fit(
    room: MemoryBound, split: ModelSplit, shares: list[WorkShare], offloads: Iterable[tuple[Offload, ...]]
) -> list[WorkShare]:
    """Of shares that differ only in the micro-batch: what rests may fit, and a backward pass beside it."""
    needs = [room.of_split(split, shares[0].ep, offload) for offload in offloads]
    resting = min((rest for rest, peak in needs if room.fits(split, peak)), default=inf)
    fitting = bisect(shares, 0, key=lambda one: not room.fits(split, room.of_share(split, one, resting)))
    return shares[:fitting]
