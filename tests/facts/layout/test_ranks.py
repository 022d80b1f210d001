"""Where ranks stand: the last axis has neighbouring ranks."""

from __future__ import annotations

from shoal.facts.layout import Layout
from shoal.facts.layout.ranks import AXES, coordinates, line, stride

LAYOUT = Layout.parse("dp=2,fsdp=3,tp=2,pp=2,cp=2")


def test_every_rank_has_a_place_of_its_own() -> None:
    places = [tuple(coordinates(rank, LAYOUT).values()) for rank in range(LAYOUT.world)]
    assert len(set(places)) == LAYOUT.world
    for rank in range(LAYOUT.world):
        place = coordinates(rank, LAYOUT)
        assert sum(place[axis] * stride(axis, LAYOUT) for axis in AXES) == rank


def test_a_line_differs_on_one_axis_alone() -> None:
    assert line(5, "fsdp", LAYOUT) == [1, 5, 9]
    assert line(0, "tp", LAYOUT) == [0, 1]
    assert line(3, "pp", LAYOUT) == [3, 27]
