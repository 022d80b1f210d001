"""Rectangles of ring attention against the square that they are a part of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.layout import Layout
from shoal.facts.layout.ring_blocks import Rectangle, rectangles
from shoal.facts.layout.sequence import held_ranges

Pair = tuple[int, int, int]  # row, query, key


def seen_in(one: Rectangle, places: list[int], keys: list[int]) -> list[Pair]:
    """The pairs that a kernel computes for a rectangle, which is told nothing of places."""
    found = []
    for row in range(one.first_row, one.last_row):
        for i in range(one.end - one.begin):
            for j in range(one.keys_end - one.keys_begin):
                behind = one.distance + i - j
                visible = not one.masked or (behind >= 0 and (one.window is None or behind < one.window))
                if visible:
                    found.append((row, places[one.begin + i], keys[one.keys_begin + j]))
    return found


def visible(rows: int, length: int, ends: list[int] | None, window: int | None) -> list[Pair]:
    """By the definition: in the same document, not later, within the window."""

    def document(row: int, place: int) -> int:
        return row if ends is None else sum(end <= row * length + place for end in ends)

    return [
        (row, query, key)
        for row in range(rows)
        for query in range(length)
        for key in range(query + 1)
        if document(row, query) == document(row, key) and (window is None or query - key < window)
    ]


@given(
    st.sampled_from([2, 3, 4]),
    st.integers(1, 2),
    st.one_of(st.none(), st.sets(st.integers(1, 47), max_size=6)),
    st.one_of(st.none(), st.integers(1, 30)),
)
def test_all_pairs_are_computed_once(cp: int, rows: int, cuts: set[int] | None, window: int | None) -> None:
    length = 24
    bounds = {row * length for row in range(rows + 1)}
    ends = None if cuts is None else sorted(bounds | {cut for cut in cuts if cut < rows * length})
    layout = Layout.parse(f"cp={cp}")
    held = [[place for part in held_ranges(layout, rank, length) for place in part] for rank in range(cp)]
    found = []
    for index in range(cp):
        for source in range(cp):
            for one in rectangles(cp, index, source, rows, length // cp, ends, window):
                seen = seen_in(one, held[index], held[source])
                found += seen
                # So that its logarithm is a number.
                assert {(row, query) for row, query, _ in seen} == {
                    (row, held[index][place])
                    for row in range(one.first_row, one.last_row)
                    for place in range(one.begin, one.end)
                }
    assert sorted(found) == visible(rows, length, ends, window)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_each_turn_is_as_much_work_on_every_rank(cp: int) -> None:
    for turn in range(1, cp):
        sizes = {
            sum((one.end - one.begin) * (one.keys_end - one.keys_begin) for one in found)
            for index in range(cp)
            if (found := list(rectangles(cp, index, (index - turn) % cp, 1, 8, None, None)))
        }
        assert sizes == {32}  # half of 8 · 8
