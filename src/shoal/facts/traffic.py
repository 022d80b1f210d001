"""Traffic: what one rank sends and receives per step, by operation and group, predicted or counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, order=True)
class Traffic:
    """All calls of one operation in one group; ``bytes`` sums each call's largest buffer."""

    op: str
    group: str
    count: int
    bytes: int


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-7``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else show_ranks(ranks)


def show_ranks(ranks: Sequence[int]) -> str:
    """``ranks 0,3,4``; evenly spaced ones as ``ranks 0-7`` or ``ranks 1-29 by 4``."""
    steps = {later - earlier for earlier, later in pairwise(ranks)}
    if len(ranks) < 4 or len(steps) > 1:
        return "ranks " + ",".join(map(str, ranks))
    (step,) = steps
    return f"ranks {ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")


def read_ranks(shown: str) -> list[int]:
    """Parse the output of ``name_ranks``; empty if a group has a name instead."""
    if spaced := re.fullmatch(r"ranks (\d+)-(\d+)(?: by (\d+))?", shown):
        first, last, step = spaced.groups("1")
        return list(range(int(first), int(last) + 1, int(step)))
    if listed := re.fullmatch(r"ranks? (\d+(?:,\d+)*)", shown):
        return [int(rank) for rank in listed[1].split(",")]
    return []
