"""Beliefs about a layout's step time, and the value of learning more. Needs no torch.

A prediction is a belief with the plan's error bar, a measurement one with the spread of its samples. What a visit to a
layout may save and what it costs both follow from beliefs, so one rule covers layouts that were never tried and layouts
whose samples are too close to call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# Converts a normal distribution's median absolute deviation into its standard deviation.
DEVIATION = 1.4826
# Step times of one layout vary by about this much between different times of day, however alike within one visit.
LEAST_SPREAD = 0.02


@dataclass(frozen=True)
class Belief:
    """A step time in seconds: a normal distribution with this mean and deviation."""

    seconds: float
    spread: float


def measured(samples: Sequence[float], visits: int = 1) -> Belief:
    """From the samples' median, so that one disturbed step counts as a single sample.

    What slows one step often slows its neighbours: more visits make a median more certain, not more samples.
    """
    middle = median(samples)
    apart = median(abs(one - middle) for one in samples) * DEVIATION
    return Belief(middle, max(apart / math.sqrt(max(1, visits)), LEAST_SPREAD * middle))


def expected_saving(best: Belief, other: Belief) -> float:
    """The expected seconds per step saved by ``other`` over ``best``, where being slower counts as zero."""
    gap, apart = best.seconds - other.seconds, math.hypot(best.spread, other.spread)
    if not apart:
        return max(0.0, gap)
    return gap * _below(gap / apart) + apart * math.exp(-((gap / apart) ** 2) / 2) / math.sqrt(2 * math.pi)


def chance_slower(best: Belief, other: Belief) -> float:
    """The probability that ``other`` is slower than ``best``."""
    gap, apart = best.seconds - other.seconds, math.hypot(best.spread, other.spread)
    return 1 - _below(gap / apart) if apart else float(gap < 0)


def _below(deviations: float) -> float:
    return (1 + math.erf(deviations / math.sqrt(2))) / 2
