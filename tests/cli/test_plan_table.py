"""The table of ``shoal plan`` on terminals of any width: every column is there, and no layout is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.command import Capture, shoal_

from shoal.cli.plan_table import show
from shoal.plan.explain import binds
from shoal.plan.report import PlanReport, plan

ASKED = ("plan", "llama3-8b", "--on", "16xH100", "--seq", "4096", "--batch", "64")


@pytest.fixture(scope="module")
def found() -> PlanReport:
    return plan("llama3-8b", "16xH100", seq=4096, batch=64, top=4, curve=True, tokens="1T", price=2.0)


@pytest.mark.parametrize("columns", [80, 120, 400])
def test_a_table_fits_its_terminal(
    found: PlanReport, columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    show(found, explain=False)
    out = capsys.readouterr().out
    # A command is for a shell, which would take a broken one apart.
    lines = [line for line in out.splitlines() if not line.startswith(("next: ", "measure: "))]
    points = [*found.over_devices, *found.over_sequences]
    plans = [*found.plans, *(point.plan for point in points if point.plan)]
    layouts = {str(one.layout) for one in plans}
    for layout in layouts:
        assert any(layout in line.split() for line in lines), layout
    too_long = [line for line in lines if len(line) > columns]
    assert [line for line in too_long if line.split()[-1] not in layouts] == []
    for one in found.plans:
        assert f"{one.tokens_per_s_per_gpu:,.0f}" in out and binds(one) in out
    first = found.plans[0]
    in_one = [line for line in lines if str(first.layout) in line.split() and f"{first.mfu:.1%}" in line]
    assert bool(in_one) is (columns == 400)


def test_several_nodes_are_in_the_next_command(capsys: Capture) -> None:
    _, out, _ = shoal_(capsys, *ASKED, "--layout", "fsdp=16")
    (line,) = [line for line in out.splitlines() if line.startswith("next: ")]
    assert line.endswith("&& shoal train plan.toml --nodes 2") and "for each of the 2 nodes" in out
    assert out.splitlines()[-1].startswith("or as a job: shoal launch plan.toml --to slurm ")
    _, out, _ = shoal_(capsys, *ASKED[:3], "8xH100", *ASKED[4:], "--layout", "fsdp=8,micro=1")
    (line,) = [line for line in out.splitlines() if line.startswith("next: ")]
    assert line.endswith("&& shoal train plan.toml")


def test_several_clusters_are_one_table(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("plan", "llama3.2-1b", "--on", "4xA100-80GB", "--on", "8xH100", "--seq", "2048", "--batch", "64")
    priced = (*words, "--tokens", "100B", "--price", "1.5", "--price", "2.5")
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = shoal_(capsys, *priced)
    assert code == 0
    _, document, _ = shoal_(capsys, *priced, "--json")
    found = json.loads(document)
    assert [row["cluster"] for row in found["compared"]] == ["4xA100-80GB", "8xH100"]
    for row, price in zip(found["compared"], (1.5, 2.5), strict=True):
        (line,) = [line for line in out.splitlines() if line.startswith(row["cluster"])]
        assert line.endswith(row["layout"]) and f"{row['days']:.3g}" in line and f"{row['cost']:,.0f}" in line
        assert row["cost"] == pytest.approx(price * row["gpu_hours"])
        assert row["tokens_per_day"] * row["days"] == pytest.approx(1e11, rel=0.001)
        assert row["kwh"] and f"{row['kwh']:,.0f}" in line
    assert found["cluster"]["name"] == "4xA100-80GB" and "fastest: 8xH100" in out and "cheapest: " in out
    code, _, err = shoal_(capsys, *words, "--tokens", "1B", "--price", "1", "--price", "2", "--price", "3")
    assert code == 2 and "3 prices for 2 clusters" in err
    code, _, err = shoal_(capsys, *words, "--save", "plan.toml")
    assert code == 2 and "a single --on" in err


@pytest.mark.long
def test_a_page_has_all_clusters(capsys: Capture, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = ("plan", "llama3.2-1b", "--on", "4xA100-80GB", "--on", "8xH100", "--seq", "2048", "--batch", "64")
    code, _, _ = shoal_(capsys, *words, "--tokens", "100B", "--html", str(page))
    text = page.read_text()
    assert code == 0 and "Clusters side by side" in text and "8xH100" in text and "goodput" in text


def test_a_question_about_a_number_is_answered_with_one(capsys: Capture) -> None:
    words = ("plan", "llama3.2-1b", "--on", "H100", "--tokens", "300B", "--deadline", "10d")
    code, out, _ = shoal_(capsys, *words)
    assert (
        code == 0
        and "the smallest cluster of those tried that is in time" in out
        and "with the error bar of ±" in " ".join(out.split())
    )
    assert "deadline of 10 days: " in out and "compute-optimal: " in out and "what would change this: " in out


def test_a_dry_run_needs_the_number(capsys: Capture) -> None:
    code, _, err = shoal_(capsys, "dryrun", "llama3.2-1b", "--on", "H100", "--seq", "1024", "--batch", "8")
    assert code == 2 and "the number of devices is missing" in err
