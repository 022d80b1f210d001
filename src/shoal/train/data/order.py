"""The order of samples: a pure function of the seed and the number of samples before.

Every epoch is its own pseudo-random permutation of all samples. It is computed, not stored: a small Feistel network
permutes the integers below a power of two, and values outside the range are permuted again until they fall inside.
Rank, world size and worker count play no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

ROUNDS = 8  # four suffice for large ranges; a handful of samples needs more to reach every order
MASK = (1 << 64) - 1

# Every function below works on a Python integer and on a uint64 array alike: the masks limit the former to 64 bits and
# do not change the latter. With one definition, the two cannot differ.
Word = TypeVar("Word", int, np.ndarray)


class SampleOrder(Protocol):
    """Which sample is used when."""

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """The samples at these indices, counted from the start of the run (from 0), as uint64."""


@dataclass(frozen=True)
class GlobalOrder:
    """Each epoch is a permutation of all samples."""

    seed: int
    count: int

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        return sample_indices(self.seed, numbers, self.count)


@dataclass(frozen=True)
class GroupedOrder:
    """Samples that belong together stay adjacent: ``groups`` orders the groups."""

    groups: SampleOrder
    size: int

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        groups, places = np.divmod(np.atleast_1d(numbers).astype(np.uint64), np.uint64(self.size))
        return self.groups.indices(groups) * np.uint64(self.size) + places


def mix(value: Word) -> Word:
    """A bijective 64-bit hash (the output function of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def sample_index(seed: int, number: int, count: int) -> int:
    """Which of ``count`` samples is used as the ``number``-th of the run (from 0)."""
    epoch, place = divmod(number, count)
    key, half = _epoch_key(seed, epoch), _half_bits(count)
    place = _permute(place, key, half)
    while place >= count:
        place = _permute(place, key, half)
    return place


def sample_indices(seed: int, numbers: np.ndarray, count: int) -> np.ndarray:
    """``sample_index`` of many numbers at once, as uint64."""
    epochs, places = np.divmod(np.atleast_1d(numbers).astype(np.uint64), np.uint64(count))
    keys, half = _epoch_key(seed, epochs), _half_bits(count)
    places = _permute(places, keys, half)
    while (outside := places >= np.uint64(count)).any():
        places[outside] = _permute(places[outside], keys[outside], half)
    return places


def _epoch_key(seed: int, epoch: Word) -> Word:
    return mix(epoch ^ mix(seed & MASK))


def _half_bits(count: int) -> int:
    """Half the bits of the smallest even-bit power of two that holds ``count``: at most 4 × count."""
    return max(1, ((count - 1).bit_length() + 1) // 2)


def _permute(place: Word, key: Word, half: int) -> Word:
    """One pass through the network: a permutation of ``range(4**half)`` chosen by the key."""
    low = (1 << half) - 1
    left, right = place >> half, place & low
    for round_number in range(ROUNDS):
        round_key = mix((key + round_number) & MASK)
        left, right = right, left ^ (mix(round_key ^ right) & low)
    return (left << half) | right
