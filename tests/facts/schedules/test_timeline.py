"""Drawings of schedules: the text of a known one, and pictures that a browser can read."""

from xml.etree import ElementTree

import pytest

from shoal.facts.layout import SCHEDULES
from shoal.facts.schedules.programs import Timeline, compute_order, instructions, simulate
from shoal.facts.schedules.timeline import as_svg, as_text

CHUNKS = {"interleaved": 2, "zbv": 2, "dualpipev": 2}
SVG = "{http://www.w3.org/2000/svg}"


def test_1f1b_as_text() -> None:
    assert as_text(simulate(instructions("1f1b", 2, 1, 3))).splitlines() == [
        "rank 0 F0 F1 .  .  B0 -  F2 B1 -  .  B2 -",
        "rank 1 .  F0 B0 -  F1 B1 -  F2 B2 -  .  .",
    ]


def test_small_letters_are_the_way_back_up_the_v() -> None:
    assert as_text(simulate(compute_order("zbv", 2, 2, 1))).splitlines() == [
        "rank 0 F0 .  .  f0 i0 w0 .  .  I0 W0",
        "rank 1 .  F0 f0 .  .  i0 w0 I0 W0 .",
    ]


def test_odd_durations_lose_no_computation() -> None:
    order = compute_order("zbv", 4, 2, 12)
    timeline = simulate(order, lambda instruction: 0.1 + 0.037 * instruction.stage, transfer=0.013)
    for unit in (None, 0.05, 1.0):
        for line, program in zip(as_text(timeline, unit).splitlines(), order, strict=True):
            assert sum(cell[0].isalpha() for cell in line.split()[2:]) == len(program)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_picture_has_a_box_for_every_computation(schedule: str) -> None:
    order = compute_order(schedule, 3, CHUNKS.get(schedule, 1), 6)
    picture = as_svg(simulate(order))
    root = ElementTree.fromstring(picture)
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert sorted(titles) == sorted(str(each) for program in order for each in program)
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x", 0)) <= float(box.get("x", 0)) + float(box.get("width", 0)) <= 1200.01
    written = {label.text for label in root.iter(f"{SVG}text")}
    assert {"rank 0", "rank 2", "forward", "backward", "backward: input", "backward: weights"} <= written
    assert picture.count("http") == 1


def test_nothing_is_drawn_without_harm() -> None:
    empty = Timeline([[], []])
    assert as_text(empty).splitlines() == ["rank 0", "rank 1"]
    ElementTree.fromstring(as_svg(empty))
