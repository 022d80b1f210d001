"""Arithmetic on stretches of time, by hand and against counting whole seconds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.intervals import Interval, common, total, union, without

PIECES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))


def test_by_hand() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (7, 8), (4, 4)]) == [(0, 3), (5, 8)]
    assert without([(0, 10)], [(2, 3), (5, 12)]) == [(0, 2), (3, 5)]
    assert common([(0, 4), (6, 9)], [(3, 7)]) == [(3, 4), (6, 7)]
    assert total([(0.5, 2), (3, 4)]) == 2.5


def seconds(pieces: list[Interval]) -> set[int]:
    return {second for start, end in pieces for second in range(int(start), int(end))}


@given(PIECES, PIECES)
def test_against_sets_of_seconds(one: list[Interval], other: list[Interval]) -> None:
    first, second = union(one), union(other)
    assert seconds(first) == seconds(one)
    assert seconds(without(first, second)) == seconds(one) - seconds(other)
    assert seconds(common(first, second)) == seconds(one) & seconds(other)
    assert total(first) == len(seconds(one))
