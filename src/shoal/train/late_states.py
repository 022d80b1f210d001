"""Which states of an update are late: written beside the next backward pass, which leaves the host's cores idle.

An update waits for the norm of all gradients, and the next forward pass for the update. But a forward pass reads new
weights alone: of AdamW in bf16, 14 bytes a parameter have to be read for them and 2 written, where a whole update moves
28. So weights go first, and states follow from the same gradients (26 bytes more) until these are needed for the next
ones. It is the same arithmetic on the same numbers, whatever is late: no bit depends on it, nor on whether gradients
were clipped.

What is late costs more in all. So no more is than the cores can do before its place is needed: the first of the
parameters, whose weights are needed first and whose gradients come last, as many as fit the time that was measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from shoal.facts.layout.offload import late_elements
from shoal.parallel.shards import Shard

NONE_LATE: frozenset[Shard] = frozenset()


class LateStates:
    """Chooses pieces for each step, by the steps before."""

    def __init__(self, order: Sequence[Shard], share: float | None = None) -> None:
        """``order``: pieces whose states may be late, as the forward pass needs them. ``share``: of their elements,
        whatever was measured."""
        self._sizes: Mapping[Shard, int] = {piece: piece.stop - piece.start for piece in order}
        self.share = share
        self.chosen_share = 0.0  # that was chosen last
        self._rate: float | None = None  # elements a second
        # Seconds from the last new weight to the next norm; the shortest, for waiting makes them longer. By the
        # number of micro-batches: the first one's gradients take the place of those of the step before.
        self._windows: dict[int, float] = {}
        self._returned: float | None = None

    def choose(self, micro_batches: int) -> frozenset[Shard]:
        """For the step after one of so many micro-batches."""
        total = sum(self._sizes.values())
        room = 0.0
        if self.share is not None:
            room = self.share * total
        elif self._rate is not None and (window := self._windows.get(micro_batches)) is not None:
            # Of this the first one's backward pass, which takes two thirds of a micro-batch's time or more.
            room = late_elements(window * 2 / (3 * micro_batches - 1), self._rate, total)
        chosen = []
        for piece, size in self._sizes.items():
            room -= size
            if room < 0:
                break
            chosen.append(piece)
        self.chosen_share = sum(self._sizes[piece] for piece in chosen) / max(1, total)
        return frozenset(chosen)

    def norm_known(self, micro_batches: int) -> None:
        if self._returned is not None:
            window = time.perf_counter() - self._returned
            self._windows[micro_batches] = min(window, self._windows.get(micro_batches, window))
        self._returned = None

    def weights_returned(self) -> None:
        self._returned = time.perf_counter()

    def written(self, elements: int, seconds: float) -> None:
        """States of so many elements, of a whole update or later."""
        if elements and seconds > 0:
            self._rate = elements / seconds
