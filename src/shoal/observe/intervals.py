"""Arithmetic on sorted, disjoint time intervals."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(pieces: Iterable[Interval]) -> list[Interval]:
    """The time covered by any of the pieces, which may overlap and be in any order."""
    merged: list[Interval] = []
    for start, end in sorted(piece for piece in pieces if piece[1] > piece[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(pieces: list[Interval], taken: list[Interval]) -> list[Interval]:
    """The parts of ``pieces`` outside ``taken``."""
    left: list[Interval] = []
    first = 0
    for start, end in pieces:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        place = first
        while place < len(taken) and taken[place][0] < end:
            if taken[place][0] > start:
                left.append((start, taken[place][0]))
            start = max(start, taken[place][1])
            place += 1
        if start < end:
            left.append((start, end))
    return left


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The intersection of both."""
    return without(one, without(one, other))


def total(pieces: Iterable[Interval]) -> float:
    return sum(end - start for start, end in pieces)
