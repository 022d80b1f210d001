"""The order of samples in a mix: which part is next, by weight, and which of its samples.

Parts are split off one at a time: of n samples shared by a first part and all the rest, the first gets ``floor(n ·
share)``. So every index of a run belongs to one part, and how many samples of each part came before follows from the
index alone: nothing is drawn or counted, and every stretch of a run has the requested shares, to within one sample per
part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm

import numpy as np

from shoal.train.data.order import SampleOrder


@dataclass(frozen=True)
class MixPhase:
    """Weights that apply from a number of samples on."""

    first: int
    weights: tuple[Fraction, ...]

    def counts(self, samples: int) -> list[int]:
        """How many of the phase's first samples come from each part."""
        left, weight, found = samples, sum(self._whole), []
        for mine in self._whole:
            taken = left * mine // weight if weight else 0
            found.append(taken)
            left, weight = left - taken, weight - mine
        return found

    def turn(self, number: int) -> tuple[int, int]:
        """Which part the phase's ``number``-th sample comes from, and how many of that part's come before it.

        It is the first part that has one more of ``number + 1`` samples than of ``number``.
        """
        left, weight = number, sum(self._whole)
        for part, mine in enumerate(self._whole):
            taken = left * mine // weight
            if (left + 1) * mine // weight != taken:
                return part, taken
            left, weight = left - taken, weight - mine
        raise ValueError("no part has a weight")

    @cached_property
    def _whole(self) -> tuple[int, ...]:
        """The weights as whole numbers, which are divided many times as fast as fractions."""
        scale = lcm(*(weight.denominator for weight in self.weights))
        return tuple(int(weight * scale) for weight in self.weights)


class MixedOrder:
    """Samples of all parts, numbered part after part."""

    def __init__(
        self, parts: Sequence[SampleOrder], sizes: Sequence[int], phases: Sequence[MixPhase]
    ) -> None:
        self.parts, self.phases = list(parts), list(phases)
        self._offsets = list(accumulate(sizes, initial=0))[:-1]
        self._firsts = [phase.first for phase in phases]
        # Samples used of each part when a phase begins.
        self._given = [[0] * len(parts)]
        for phase, after in pairwise(phases):
            new = phase.counts(after.first - phase.first)
            self._given.append([old + more for old, more in zip(self._given[-1], new, strict=True)])

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        turns = [self.turn(int(number)) for number in numbers]
        whose = np.array([part for part, _ in turns])
        places = np.array([place for _, place in turns], dtype=np.uint64)
        found = np.empty(len(turns), dtype=np.uint64)
        for part, (order, offset) in enumerate(zip(self.parts, self._offsets, strict=True)):
            mine = whose == part
            if mine.any():
                found[mine] = order.indices(places[mine]) + np.uint64(offset)
        return found

    def turn(self, number: int) -> tuple[int, int]:
        """Which part the run's ``number``-th sample comes from, and how many samples of that part came before."""
        which = bisect_right(self._firsts, number) - 1
        phase = self.phases[which]
        part, taken = phase.turn(number - phase.first)
        return part, self._given[which][part] + taken
