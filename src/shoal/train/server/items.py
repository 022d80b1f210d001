"""The work that servers hand out: items of steps, in order, and parts of an evaluation; a lost worker's item is
handed out again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from shoal.parallel.server import END, EVALUATE, TRAIN


class WorkItem(NamedTuple):
    """What a worker should do."""

    kind: int
    number: int = 0  # of a training item, or of a part of an evaluation


class WorkQueue:
    """Items in order of their number, up to a limit. Not thread-safe: its owner holds a lock."""

    def __init__(self, first: int) -> None:
        self.next = self.limit = first
        self.ended = False
        self.held: dict[int, WorkItem] = {}  # by worker
        self._again: list[WorkItem] = []

    def take(self, worker: int) -> WorkItem | None:
        """The next item for a worker that has finished its previous one; None if there is none now."""
        self.held.pop(worker, None)
        if self.ended:
            return WorkItem(END)
        item = None
        if self._again:
            item = heapq.heappop(self._again)
        elif self.next < self.limit:
            item = WorkItem(TRAIN, self.next)
            self.next += 1
        if item is not None:
            self.held[worker] = item
        return item

    def done(self, worker: int) -> None:
        """A worker's item has arrived: if the worker is lost from now on, the item is not handed out again."""
        self.held.pop(worker, None)

    def lost(self, worker: int) -> WorkItem | None:
        """Give a lost worker's item to another worker; returns the item."""
        item = self.held.pop(worker, None)
        if item is not None:
            heapq.heappush(self._again, item)
        return item

    def evaluate(self, parts: Iterable[int]) -> None:
        for part in parts:
            heapq.heappush(self._again, WorkItem(EVALUATE, part))
