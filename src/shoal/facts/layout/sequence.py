"""The cut of a sequence over context ranks (``cp``): which tokens of every row a rank holds, decided once.

``ring``: a row has 2·cp equal pieces; rank r holds piece r and, counted from the end, piece r again. A late token
attends to more than an early one; with an early and a late piece each, all ranks have the same causal work (zigzag).
``ulysses``: rank r holds the r-th of cp equal pieces; attention sees whole rows of some heads, so its work is even.
"""

from __future__ import annotations

from math import lcm

from shoal.facts.layout import Layout


def piece_count(layout: Layout) -> int:
    """Equal pieces that a row is cut into."""
    return 2 * layout.cp if layout.cp > 1 and layout.cp_kind == "ring" else layout.cp


def length_unit(layout: Layout) -> int:
    """What a row's length has to be a multiple of: whole pieces and, with sequence parallelism, whole parts of those
    for tensor ranks.
    """
    return lcm(piece_count(layout), layout.cp * layout.tp if layout.sp else 1)


def held_pieces(layout: Layout, index: int) -> tuple[int, ...]:
    """The pieces of context rank ``index``, in the order in which it holds them, which is that of the row."""
    last = piece_count(layout) - 1
    return (index, last - index) if layout.cp > 1 and layout.cp_kind == "ring" else (index,)


def held_ranges(layout: Layout, index: int, length: int) -> list[range]:
    """The places of a row of ``length`` tokens that context rank ``index`` holds."""
    size = length // piece_count(layout)
    return [range(piece * size, (piece + 1) * size) for piece in held_pieces(layout, index)]


def holder(layout: Layout, place: int, length: int) -> tuple[int, int]:
    """The context rank that holds a place of a row, and where among its own tokens."""
    for index in range(layout.cp):
        before = 0
        for held in held_ranges(layout, index, length):
            if place in held:
                return index, before + place - held.start
            before += len(held)
    raise ValueError(f"place {place} of a row of {length} tokens that cp={layout.cp} cuts")
