"""Return new weights to the device while the gradients that produced them stay in place.

Elsewhere a new weight overwrites its gradient. If an update's states are written later (``train/host_update.py``), its
gradient is read once more, so new weights pass through a small ring of pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.facts.layout.offload import STRETCHES, returning_elements
from shoal.parallel.offload.activations import CopyStreams
from shoal.parallel.offload.host_memory import HostMemory


class ReturnRing:
    """A ring of a few parts: one is written while the others are in flight."""

    def __init__(self, elements: int, dtype: torch.dtype, memory: HostMemory, streams: CopyStreams) -> None:
        """``elements``: of all weights that return through this ring."""
        self.length = max(1, returning_elements(elements) // STRETCHES)
        room = memory.take(STRETCHES * self.length * dtype.itemsize)
        self._parts = list(room.bytes.view(dtype).split(self.length))
        self._left: list[torch.cuda.Event | None] = [None] * len(self._parts)
        self._streams, self._next = streams, 0

    def through(self, working: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield stretches of a flat device tensor, each with room for its new values.

        Each stretch is copied when the next one is asked for.
        """
        for start in range(0, working.numel(), self.length):
            there = working[start : start + self.length]
            number, self._next = self._next, (self._next + 1) % len(self._parts)
            if (left := self._left[number]) is not None:
                left.synchronize()
            room = self._parts[number][: there.numel()]
            yield slice(start, start + there.numel()), room
            if (back := self._streams.back) is None:
                there.copy_(room)
                continue
            # All readers of the old weights have finished: the gradient norm came after them.
            with torch.cuda.stream(back):
                there.copy_(room, non_blocking=True)
            self._left[number] = back.record_event()
