"""Choose which states of an update to write late: during the next backward pass, which leaves the host's cores idle.

An update waits for the norm of all gradients, and the next forward pass waits for the update. But a forward pass reads
only new weights: AdamW in bf16 reads 14 bytes per parameter and writes 2 to produce them, while a full update moves 28.
So weights are computed first, and states follow from the same gradients (26 bytes more) before the next gradients need
their place. The arithmetic is the same on the same numbers, whatever is late: no bit depends on it, nor on whether
gradients were clipped.

Late states cost more in total. So only as many are late as the cores can write in time: the first parameters of the
network, whose weights are needed first and whose gradients come last, as many as fit the measured time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from shoal.facts.layout.offload import late_elements
from shoal.parallel.shards import Shard

NONE_LATE: frozenset[Shard] = frozenset()


class LateStates:
    """Chooses pieces for each step from timings of earlier steps."""

    def __init__(self, order: Sequence[Shard], share: float | None = None) -> None:
        """``order``: pieces whose states may be late, in forward order. ``share``: a fixed share of their elements,
        overriding measurements.
        """
        self._sizes: Mapping[Shard, int] = {piece: piece.stop - piece.start for piece in order}
        self.share = share
        self.chosen_share = 0.0  # the share chosen last
        self._rate: float | None = None  # elements per second
        # Seconds from the last new weight to the next norm, by number of micro-batches, because the first micro-batch's
        # gradients overwrite those of the previous step. Keeps the shortest, since waiting only lengthens them.
        self._windows: dict[int, float] = {}
        self._returned: float | None = None

    def choose(self, micro_batches: int) -> frozenset[Shard]:
        """Choose for the step after one with this many micro-batches."""
        total = sum(self._sizes.values())
        room = 0.0
        if self.share is not None:
            room = self.share * total
        elif self._rate is not None and (window := self._windows.get(micro_batches)) is not None:
            # The part of the window in the first micro-batch's backward pass, which takes at least two thirds of a
            # micro-batch's time.
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
        """Record how long writing this many elements' states took, in a full update or late."""
        if elements and seconds > 0:
            self._rate = elements / seconds
