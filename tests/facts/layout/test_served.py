"""Servers share all elements evenly, each once; items are parts of steps in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.layout.server_ranges import elements, item_of, served_ranges, step_and_part


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 9))
def test_every_element_is_served_once_and_evenly(sizes: list[int], servers: int) -> None:
    parameters = [(f"parameter{place}", size) for place, size in enumerate(sizes)]
    ranges = served_ranges(parameters, servers)
    served = [(name, place) for mine in ranges for name, start, stop in mine for place in range(start, stop)]
    # One after another: so the ranges of a server are one stretch of the whole vector.
    assert served == [(name, place) for name, size in parameters for place in range(size)]
    share = -(-sum(sizes) // servers)
    assert len(ranges) == servers and all(elements(mine) <= share for mine in ranges)


@given(st.integers(1, 100), st.integers(1, 8), st.data())
def test_an_item_is_a_part_of_a_step(step: int, workers: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, workers - 1))
    assert step_and_part(item_of(step, part, workers), workers) == (step, part)
