"""A plan as a page: its grid is the planner's own, and nothing in it is fetched or executed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.report.test_report import PageReader

from shoal.plan.landscape import ANY, Cell, frontier, landscape
from shoal.plan.report import PlanReport, plan
from shoal.plan.scale import best, resized
from shoal.report.page import asset
from shoal.report.plan.plan_page import plan_page


@pytest.fixture(scope="module")
def found() -> PlanReport:
    return plan("llama3.2-1b", "2xH100", seq=2048, batch=8, tokens="1B", price=2.0)


@pytest.fixture(scope="module")
def cells(found: PlanReport) -> list[Cell]:
    return landscape(found)


@pytest.mark.long
def test_the_grid_has_half_and_twice_of_what_was_asked_for(found: PlanReport, cells: list[Cell]) -> None:
    assert (cells[0].devices, cells[0].batch, cells[0].seq) == (2, 8, 2048)
    assert {cell.devices for cell in cells} == {1, 2, 4}
    assert {cell.batch for cell in cells} == {4, 8, 16} and {cell.seq for cell in cells} == {1024, 2048, 4096}
    assert len(cells) == len({cell.key for cell in cells}) == 27
    other = next(cell for cell in cells if (cell.devices, cell.batch, cell.seq) == (4, 8, 2048))
    request = resized(found.asked, 4)
    assert request is not None
    chosen = best(request)
    assert chosen is not None
    first = other.content["best"][ANY][0]
    assert (
        first["layout"] == str(chosen.layout) and first["seconds"] == chosen.step.seconds and first["chosen"]
    )


@pytest.mark.long
def test_what_is_chosen_stands_first_and_every_plan_found_is_a_point(
    found: PlanReport, cells: list[Cell]
) -> None:
    own = cells[0].content
    assert found.choice is not None and own["best"][ANY][0]["layout"] == str(found.choice.layout)
    points = {point[3]: point for point in own["points"]}
    for one in found.plans:
        assert points[str(one.layout)][1] == one.memory.device_p90
    for name in ("none", "selective", "full"):
        assert all(f"recompute={name}" in told["layout"] or name == "none" for told in own["best"][name])
    # What does not fit says why; what fits, nothing.
    assert all(bool(point[4]) == (point[1] > own["capacity"]) for point in own["points"])


@pytest.mark.long
def test_nothing_beats_the_frontier(found: PlanReport, cells: list[Cell]) -> None:
    line = cells[0].content["frontier"][ANY]
    assert [fast for fast, _ in line] == sorted(fast for fast, _ in line)
    assert [held for _, held in line] == sorted(held for _, held in line)
    for fast, held, _, _, reason in cells[0].content["points"]:
        if not reason:
            assert any(one_fast >= fast and one_held <= held for one_fast, one_held in line)
    assert frontier([]) == []


@pytest.mark.long
def test_the_page_is_one_file_that_fetches_nothing(found: PlanReport, cells: list[Cell]) -> None:
    reader = PageReader(plan_page(found, cells))
    assert reader.fetched == [] and reader.handlers == []
    assert reader.scripts == [asset("uplot.min.js"), asset("charts.js"), asset("plan.js")]
    assert reader.data["cells"].keys() == {cell.key for cell in cells}
    assert {"devices", "sequences"} == reader.data["charts"].keys()
    assert found.decision.text in reader.text and "GPU-hours" in reader.text


def test_a_pipelines_messages_are_those_of_its_stages() -> None:
    answer = plan("llama3.2-1b", "16xH100", seq=2048, batch=64, layout="pp=4,fsdp=4")
    (own,) = landscape(answer)
    groups = {one["group"]: one for one in own.content["best"][ANY][0]["axes"]}
    assert (groups["pp"]["ranks"], groups["pp"]["stride"]) == (4, 4)
    assert (groups["fsdp"]["ranks"], groups["fsdp"]["stride"]) == (4, 1)
    held = own.content["best"][ANY][0]
    assert sum(held["memory"].values()) == held["needs"]  # a bar is as long as the number beside it


def test_hostile_names_are_shown(tmp_path: Path) -> None:
    name = "<script>x</script>"
    folder = tmp_path / name.replace("/", "")
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    answer = plan(str(folder), "1xH100", seq=64, batch=1)
    reader = PageReader(plan_page(answer, landscape(answer)))
    assert len(reader.scripts) == 3 and "<script>x" in reader.text


@pytest.mark.long
def test_a_layout_that_was_asked_for_stands_alone_in_the_grid() -> None:
    answer = plan("llama3-8b", "1xH100", seq=8192, batch=8, layout="dp=1")
    (own,) = landscape(answer)
    assert own.content["best"][ANY] == [] or not own.content["best"][ANY][0]["chosen"]
    reader = PageReader(plan_page(answer, [own]))
    assert "What would make it fit" in reader.text
