"""Context parallelism (``cp``): which tokens of every row each rank holds.

``ring``: a row has 2·cp equal pieces; rank r holds piece r from the start and piece r from the end. Late tokens
attend to more than early ones, so with one of each all ranks do the same causal work (zigzag). ``ulysses``: rank r
holds the r-th of cp equal pieces; attention sees whole rows of some heads, so its work is already even.
"""

from __future__ import annotations

from math import lcm

from shoal.facts.layout import Layout


def piece_count(layout: Layout) -> int:
    """Number of equal pieces in a row."""
    return 2 * layout.cp if layout.cp > 1 and layout.cp_kind == "ring" else layout.cp


def length_unit(layout: Layout) -> int:
    """The unit that a row's length must be a multiple of: whole pieces, and with sequence parallelism pieces that
    tensor ranks can split evenly.
    """
    return lcm(piece_count(layout), layout.cp * layout.tp if layout.sp else 1)


def held_pieces(layout: Layout, index: int) -> tuple[int, ...]:
    """The pieces of context rank ``index``, in row order, which is the order in which it holds them."""
    last = piece_count(layout) - 1
    return (index, last - index) if layout.cp > 1 and layout.cp_kind == "ring" else (index,)


def held_ranges(layout: Layout, index: int, length: int) -> list[range]:
    """The positions in a row of ``length`` tokens that context rank ``index`` holds."""
    size = length // piece_count(layout)
    return [range(piece * size, (piece + 1) * size) for piece in held_pieces(layout, index)]


def holder(layout: Layout, place: int, length: int) -> tuple[int, int]:
    """The context rank that holds a position of a row, and its index among that rank's tokens."""
    for index in range(layout.cp):
        before = 0
        for held in held_ranges(layout, index, length):
            if place in held:
                return index, before + place - held.start
            before += len(held)
    raise ValueError(f"place {place} of a row of {length} tokens that cp={layout.cp} cuts")
