"""Rank coordinates: a rank's position on each axis of a layout, and its neighbours."""

from __future__ import annotations

from shoal.facts.layout import Layout

# From the slowest to the fastest varying: neighbours on the last axis have adjacent ranks, hence the fastest links.
AXES = ("pp", "dp", "fsdp", "cp", "tp")


def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """A rank's position on each axis."""
    place: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(layout, axis))
    return place


def stride(axis: str, layout: Layout) -> int:
    """The distance in rank between neighbours on an axis."""
    apart = 1
    for faster in AXES[AXES.index(axis) + 1 :]:
        apart *= getattr(layout, faster)
    return apart


def line(rank: int, axis: str, layout: Layout) -> list[int]:
    """The ranks that differ from this one on that axis alone, including itself."""
    apart = stride(axis, layout)
    start = rank - coordinates(rank, layout)[axis] * apart
    return [start + index * apart for index in range(getattr(layout, axis))]
