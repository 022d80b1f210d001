"""What is believed of a layout's step time, and what it is worth to learn more. Needs no torch.

A prediction is a belief with the plan's error bar, a measurement one with the spread of its samples. What a visit to a
layout may save and what it costs both follow from the beliefs, so that one rule serves layouts that were never tried
and layouts whose samples are too close to call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# Of a normal distribution: its deviation over its median absolute deviation.
DEVIATION = 1.4826
# Steps of the same layout at another time of the day differ by about as much, however alike they are among themselves.
LEAST_SPREAD = 0.02


@dataclass(frozen=True)
class Belief:
    """Seconds of a step: normally distributed, with this deviation."""

    seconds: float
    spread: float


def measured(samples: Sequence[float], visits: int = 1) -> Belief:
    """By their median: a step that something else held up counts as one step and no more.

    What holds up one step often holds up those beside it: it is visits that make a median more certain, not samples.
    """
    middle = median(samples)
    apart = median(abs(one - middle) for one in samples) * DEVIATION
    return Belief(middle, max(apart / math.sqrt(max(1, visits)), LEAST_SPREAD * middle))


def expected_saving(best: Belief, other: Belief) -> float:
    """Seconds per step by which ``other`` is faster than ``best`` on average, where being slower counts as nothing."""
    gap, apart = best.seconds - other.seconds, math.hypot(best.spread, other.spread)
    if not apart:
        return max(0.0, gap)
    return gap * _below(gap / apart) + apart * math.exp(-((gap / apart) ** 2) / 2) / math.sqrt(2 * math.pi)


def chance_slower(best: Belief, other: Belief) -> float:
    """That ``other`` turns out to be slower than ``best``."""
    gap, apart = best.seconds - other.seconds, math.hypot(best.spread, other.spread)
    return 1 - _below(gap / apart) if apart else float(gap < 0)


def _below(deviations: float) -> float:
    return (1 + math.erf(deviations / math.sqrt(2))) / 2
