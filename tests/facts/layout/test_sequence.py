"""The cut of a sequence over context ranks."""

from __future__ import annotations

import pytest

from shoal.facts.layout import Layout
from shoal.facts.layout.sequence import held_ranges, holder, length_unit


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_every_token_is_one_ranks(cp: int, kind: str) -> None:
    layout, length = Layout.parse(f"cp={cp},cp_kind={kind}"), 48
    held = [[place for part in held_ranges(layout, rank, length) for place in part] for rank in range(cp)]
    assert sorted(place for places in held for place in places) == list(range(length))
    assert {len(places) for places in held} == {length // cp}
    for rank, places in enumerate(held):
        assert places == sorted(places)
        assert [holder(layout, place, length) for place in places] == [
            (rank, number) for number in range(len(places))
        ]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_ring_has_even_causal_work(cp: int) -> None:
    layout = Layout.parse(f"cp={cp}")
    work = [sum(place + 1 for part in held_ranges(layout, rank, 64) for place in part) for rank in range(cp)]
    assert len(set(work)) == 1


def test_ulysses_holds_neighbouring_tokens() -> None:
    assert held_ranges(Layout.parse("cp=4,cp_kind=ulysses"), 2, 16) == [range(8, 12)]


@pytest.mark.parametrize(
    ("layout", "unit"),
    [
        ("dp=2", 1),
        ("tp=4", 4),
        ("cp=2", 4),
        ("cp=2,cp_kind=ulysses", 2),
        ("tp=4,cp=3", 12),
        ("tp=4,sp=0,cp=3", 6),
    ],
)
def test_rows_are_whole_pieces(layout: str, unit: int) -> None:
    assert length_unit(Layout.parse(layout)) == unit
