"""The order of samples with a window: permute the shards, then permute samples within every W of them.

A run needs at most W shards at a time, each once per epoch, so shards streamed from an object store are fetched once.
The order is a pure function of the seed and the number of samples before, as without a window, wherever the shards are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from shoal.train.data.order import MASK, mix, sample_indices


class WindowOrder:
    """``bounds``: the first sample of each shard, and the total."""

    def __init__(self, seed: int, bounds: Sequence[int], window: int) -> None:
        self.seed, self.window = seed, window
        self.bounds = np.array(bounds, dtype=np.int64)
        self.sizes = np.diff(self.bounds)
        self.count = int(self.bounds[-1])
        self._shards = lru_cache(2)(self._permuted)

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(np.asarray(numbers).astype(np.int64), self.count)
        found = np.empty(len(places), dtype=np.uint64)
        for epoch in np.unique(epochs):
            shards, ends = self._shards(int(epoch))
            windows = np.searchsorted(ends, places, side="right")
            for window in np.unique(windows[epochs == epoch]):
                mine = (epochs == epoch) & (windows == window)
                first = int(ends[window - 1]) if window else 0
                chosen = shards[window * self.window : (window + 1) * self.window]
                found[mine] = self._within(int(epoch), int(window), chosen, places[mine] - first)
        return found

    def _within(self, epoch: int, window: int, shards: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The samples at these places of a window."""
        ends = np.cumsum(self.sizes[shards])
        seed = mix((mix((self.seed + epoch) & MASK) + window) & MASK)
        drawn = sample_indices(seed, places.astype(np.uint64), int(ends[-1])).astype(np.int64)
        which = np.searchsorted(ends, drawn, side="right")
        return (self.bounds[shards[which]] + drawn - (ends - self.sizes[shards])[which]).astype(np.uint64)

    def _permuted(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's order of shards, and where in the epoch each window ends."""
        count = len(self.sizes)
        places = np.arange(count, dtype=np.uint64) + np.uint64(epoch * count)
        shards = sample_indices(self.seed, places, count).astype(np.int64)
        ends = np.cumsum(self.sizes[shards])
        return shards, np.append(
            ends[self.window - 1 :: self.window], ends[-1:] if count % self.window else ends[:0]
        )
