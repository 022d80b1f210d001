"""Headroom: device memory that a plan leaves free, and the probability that the run still needs more than there is.

Peaks are predicted as bytes in tensors. The ratio of what the allocator then reserved to the prediction is known for
every rank measured by ``benchmarks/predicted.py``: prediction error and fragmentation together. Ranks with 20 GiB and
more give the probability that a plan runs out of memory; a test recomputes it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise

from shoal.facts.ledger import Ledger
from shoal.facts.problem import BadInput
from shoal.predict.memory.device import FRAGMENTED

GIB = 2**30
# Of this many measured ranks, the share that reserved more than each multiple of the prediction.
RANKS, LEAST = 66, 20 * GIB
MORE_THAN = ((1.0, 1.0), (1.0055, 0.95), (1.0184, 0.75), (1.0291, 0.5), (1.0571, 0.2))
# The mean excess over the last of these among ranks that reserved more. Beyond it, the tail is exponential.
BEYOND = 0.0148

FIX = "a fraction of the device's memory, as in --headroom 0.1, or a size, as in --headroom 8GiB"
UNITS = {"": None, "%": None, "gib": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}


@dataclass(frozen=True)
class Headroom:
    """Bytes, a share of device memory at the 90th percentile, or a maximum probability of running out."""

    share: float = 0.0
    size: int = 0
    risk: float = 1.0

    def bytes(self, capacity: int) -> int:
        return self.size + round(self.share * capacity)

    def left_by(self, memory: Ledger) -> bool:
        """Whether a plan fits and leaves this much."""
        if not memory.fits or memory.capacity - memory.device_p90 < self.bytes(memory.capacity):
            return False
        return self.risk >= 1 or out_of_memory(memory) <= self.risk

    @property
    def most(self) -> float:
        """The share of reservable memory that a plan may be predicted to allocate at this risk."""
        return 1 / least_times(self.risk)

    def __str__(self) -> str:
        """As in: the fastest layout that …"""
        if self.risk < 1:
            return f"runs out of memory less than once in {1 / self.risk:,.0f} times"
        return (
            f"leaves {f'{self.size / GIB:.3g} GiB' if self.size else f'{self.share:.0%} of the memory'} free"
        )


NONE = Headroom()


def read_headroom(text: str) -> Headroom:
    """``0.1``, ``10%``, ``8GiB``; raises ``BadInput``."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z%]*)", text.strip())
    unit = match[2].lower() if match else ""
    if match is None or unit not in UNITS:
        raise BadInput(f"--headroom {text}: it is not understood", FIX)
    value, size = float(match[1]), UNITS[unit]
    if size is not None:
        return Headroom(size=round(value * size))
    share = value / 100 if unit == "%" else value
    if share >= 1:
        raise BadInput(f"--headroom {text}: nothing is left to train in", FIX)
    return Headroom(share=share)


def out_of_memory(memory: Ledger) -> float:
    """The probability that this layout needs more memory than its devices have."""
    if memory.reserved == memory.peak_allocated:  # a CPU's allocator returns freed memory
        return 0.0 if memory.fits else 1.0
    beside = memory.device_total - memory.reserved
    return more_than((memory.capacity - beside) / (memory.reserved / FRAGMENTED))


def more_than(times: float) -> float:
    """The probability that more than ``times`` the prediction is reserved."""
    last, share = MORE_THAN[-1]
    if times >= last:
        return share * math.exp((last - times) / BEYOND)
    for (low, high_share), (high, low_share) in pairwise(MORE_THAN):
        if low <= times:
            found = high_share + (low_share - high_share) * (times - low) / (high - low)
    return found if times >= MORE_THAN[0][0] else 1.0


def least_times(risk: float) -> float:
    """The multiple of the prediction that is exceeded with at most this probability."""
    last, share = MORE_THAN[-1]
    if risk < share:
        return last + BEYOND * math.log(share / risk)
    for (low, high_share), (high, low_share) in pairwise(MORE_THAN):
        if low_share <= risk <= high_share:
            found = low + (high - low) * (high_share - risk) / (high_share - low_share)
    return found


def free_bytes(memory: Ledger) -> int:
    """Bytes free at the 90th percentile of fragmentation, like all memory statements about a plan."""
    return memory.capacity - memory.device_p90


def free(memory: Ledger) -> str:
    return f"{free_bytes(memory) / GIB:.1f} GiB free"


# A negligible probability of running out of memory: the choice has none larger, if there is such a layout.
UNLIKELY = 0.001
USUAL = Headroom(risk=UNLIKELY)


def chance(probability: float) -> str:
    """``9%``, ``0.4%``, ``<0.1%``."""
    if probability < 0.001:
        return "<0.1%"
    return f"{probability:.0%}" if probability >= 0.1 else f"{probability:.1%}"
