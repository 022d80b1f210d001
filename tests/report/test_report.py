"""A run's report: what it shows, where from, and what it makes of bad and hostile directories."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Capture, shoal_
from tests.report.made_runs import HOSTILE, made_run

from shoal.cli.summary import answer
from shoal.launch.report import Report
from shoal.report.columns import thinned
from shoal.report.page import asset, embedded
from shoal.report.run.report_page import report_page
from shoal.report.run_files import read_run

VOID = ("meta", "br", "img", "input", "link")


class PageReader(HTMLParser):
    """What a browser would see: elements, what they would fetch, scripts, and text outside of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.handlers: list[str] = []
        self.sources: list[str] = []
        self.untraced: list[str] = []  # figures and numbers that name no source
        self.scripts: list[str] = []
        self.data: dict[str, Any] = {}
        self.words: list[str] = []
        self._script = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.handlers += [name] * name.startswith("on")
            if name in ("src", "href") and not (value or "").startswith("#"):
                self.fetched.append(value or "")
            if name == "data-sources":
                self.sources += (value or "").split(" | ")
        told = dict(attrs)
        figure = tag == "figure" or "tile" in (told.get("class") or "").split()
        self.untraced += [str(told)] * (figure and not told.get("data-sources"))
        self._script = dict(attrs).get("type") or "javascript" if tag == "script" else ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self._script == "application/json":
                self.data = json.loads(data)
            else:
                self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


def page_of(*paths: Path) -> PageReader:
    return PageReader(report_page(paths)[0])


def test_a_report_shows_all_that_a_run_directory_holds(tmp_path: Path) -> None:
    found = page_of(made_run(tmp_path / "run", experts=8))
    charts = {"loss", "lr", "grad_norm", "tokens_per_s", "mfu", "memory_peak", "step_s", "expert_imbalance"}
    assert found.data["charts"].keys() == charts
    kinds = [mark["kind"] for mark in found.data["charts"]["loss"]["marks"]]
    assert kinds == ["restart", "fault", "note", "layout"]
    names = [series["name"] for series in found.data["charts"]["loss"]["series"]]
    assert names == ["training loss", "validation: books", "validation: code"]
    for words in (
        "finished", "Memory ledger", "Timeline of a step", "By link", "Load by expert", "Mix", "no field 'text'",
        "What it writes", "torch 2.13.0", "config.toml, complete", "rank 1 failed", "pp=2 → pp=2,micro=1",
    ):  # fmt: skip
        assert words in found.text, words
    assert found.fetched == [] and found.handlers == []


def test_every_figure_names_fields_that_are_in_the_run_directory(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", experts=8)
    found = page_of(run)
    sources = set(found.sources)
    assert len(sources) > 22 and found.untraced == []
    for source in sources:
        file, _, fields = source.partition(": ")
        (path, *_) = sorted(run.glob(file))
        assert path.is_file(), source
        known = {name for row in _tables(path) for name in row}
        for field in filter(None, fields.split(", ")):
            # A run that validates on one set has no others.
            assert field.partition(".")[0] in known, source


def _tables(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".toml":
        yield {"data": 0}
        return
    text = path.read_text()
    yield from map(json.loads, text.splitlines() if path.suffix == ".jsonl" else [text])


def test_values_of_a_curve_are_the_rows_own(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=5000)
    rows = {row["step"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    (series, *_) = page_of(run).data["charts"]["loss"]["series"]
    steps = series["x"]["step"]
    assert len(steps) < 2000 and steps[0] == 1 and steps[-1] == 5000
    assert {2500, 2501, 3750, 3751} <= set(steps)  # beside events
    for step, tokens, loss in zip(steps, series["x"]["tokens"], series["y"], strict=True):
        assert loss == pytest.approx(rows[step]["loss"], rel=1e-5) and tokens == rows[step]["tokens"]


def test_a_spike_of_one_step_survives_thinning() -> None:
    column: list[float | None] = [1.0] * 100_000
    column[54_321], column[77] = 9.0, None
    kept = thinned(column, 500, always=[11, 77])
    assert 54_321 in kept and 11 in kept and 77 not in kept and {0, 99_999} <= set(kept)
    assert len(kept) <= 2 * 500 + 3


def test_hostile_texts_are_shown_and_never_executed(tmp_path: Path) -> None:
    run = made_run(tmp_path / "<b>run", hostile=HOSTILE)
    found = page_of(run)
    assert found.scripts == [asset("uplot.min.js"), asset("charts.js")]
    assert found.handlers == [] and found.fetched == []
    assert found.text.count(HOSTILE) >= 5
    assert "<" not in embedded({"log": HOSTILE}) and json.loads(embedded({"log": HOSTILE})) == {
        "log": HOSTILE
    }


def test_the_policy_lets_a_browser_run_our_scripts_alone(tmp_path: Path) -> None:
    text, _ = report_page([made_run(tmp_path / "run")])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert policy.count("sha256-") == 2 and "script-src 'unsafe" not in policy


@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 41, "lo',
        '{"step": 41, "loss": NaN}\n[1]\nnonsense\n{"step": "x"}\n',
        '{"step": 7, "loss": 1}\n',
    ],
)
def test_torn_and_odd_lines_are_left_out(tmp_path: Path, torn: str) -> None:
    run = made_run(tmp_path / "run")
    for name in ("metrics.jsonl", "faults.jsonl", "samples.jsonl"):
        with (run / name).open("a") as file:
            file.write(torn)
    (run / "plan.json").write_text("{")
    (run / "observed" / "rank-00000.json").write_text('{"rank": 0, "traffic": 3, "peak_by_category": []}')
    found = read_run(run)
    assert found.metrics.steps[:40] == list(range(1, 41)) and found.plan == {}
    assert "plan.json cannot be read" in page_of(run).text


def test_what_has_hardly_begun_is_shown_in_words(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("layout = ")
    assert (
        "No step has been recorded yet" in page_of(run).text
        and "config.toml cannot be read" in page_of(run).text
    )
    (run / "manifest.json").write_text('{"shoal": "0.0.1", "packages": [], "host": 3, "cluster": "x"}')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    assert "made by Shoal 0.0.1" in page_of(run).text


def test_how_a_run_stands(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", finished=False)
    assert read_run(run).state == "stopped"
    alive = {"process": 1, "node": "0", "time": time.time()}
    (run / ".alive").write_text(json.dumps(alive))
    assert read_run(run).state == "running"
    assert "still going on" in page_of(run).text
    import socket

    manifest = json.loads((run / "manifest.json").read_text())
    manifest["host"]["name"] = socket.gethostname()
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / ".alive").write_text(json.dumps({**alive, "process": 2**22 + 1}))
    assert read_run(run).state == "launcher lost"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "there is no run at"),
        (lambda path: path.mkdir(), "is empty"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: (path / "sub").mkdir(parents=True), "holds no run"),
    ],
)
def test_what_is_no_run_is_refused_in_words(tmp_path: Path, capsys: Capture, make: Any, words: str) -> None:
    make(tmp_path / "run")
    code, out, error = shoal_(capsys, "report", str(tmp_path / "run"))
    assert code == 2 and words in error and "fix:" in error and out == ""


def test_the_command_writes_the_page_for_its_owner_alone(tmp_path: Path, capsys: Capture) -> None:
    run = made_run(tmp_path / "run")
    code, out, _ = shoal_(capsys, "report", str(run), "--json")
    told = json.loads(out)
    page = Path(told["report"])
    assert code == 0 and page == run / "report.html" and page.stat().st_mode & 0o777 == 0o600
    assert told["runs"][0]["step"] == 40 and told["runs"][0]["faults"] == {"killed": 1}
    code, _, error = shoal_(capsys, "report", str(run), "--to", str(tmp_path / "no" / "page.html"))
    assert code == 2 and "there is no directory" in error


def test_several_runs_stand_side_by_side(tmp_path: Path, capsys: Capture) -> None:
    first, second = (
        made_run(tmp_path / "first"),
        made_run(tmp_path / "second", steps=60, layout="dp=2", faults=False),
    )
    code, _, error = shoal_(capsys, "report", str(first), str(second))
    assert code == 2 and "--to FILE" in error
    code, _, _ = shoal_(capsys, "report", str(first), str(second), "--to", str(tmp_path / "both.html"))
    found = PageReader((tmp_path / "both.html").read_text())
    assert code == 0 and {"first: predicted", "second: predicted"} <= {*found.words}
    names = {series["name"] for series in found.data["charts"]["lr"]["series"]}
    assert names == {"first: learning rate", "second: learning rate"}
    assert "recipe.steps" in found.text and "layout" in found.text


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_run_names_its_report_in_its_last_lines(tmp_path: Path, capsys: Capture, code: int) -> None:
    run = made_run(tmp_path / "run")
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert answer(Report(code, run, 40, "ended", row, None), False, {}) == code
    assert str(run / "report.html") in "".join(capsys.readouterr()) and (run / "report.html").exists()
    assert answer(Report(code, run, 40, "ended", row, None), True, {}) == code
    assert json.loads(capsys.readouterr().out)["report"] == str(run / "report.html")


def test_a_run_whose_report_cannot_be_written_ends_as_it_did(tmp_path: Path, capsys: Capture) -> None:
    run = made_run(tmp_path / "run")
    (run / "report.html").mkdir()
    assert answer(Report(0, run, 40, "ended", None, None), False, {}) == 0
    assert "no report: " in capsys.readouterr().err


@pytest.mark.long
def test_a_real_run_records_what_its_report_shows(tmp_path: Path) -> None:
    rows = [json.dumps({"text": "the shoal turns at once " * 20}) for _ in range(40)]
    (tmp_path / "texts.jsonl").write_text("\n".join([*rows, '{"txt": "lost"}']) + "\n")
    values = ("recipe.steps=3", "recipe.batch=2", "recipe.seq=32", f"data.source={tmp_path / 'texts.jsonl'}")
    words = [word for value in values for word in ("--set", value)]
    command = [sys.executable, "-m", "shoal", "train", *words, "--run", str(tmp_path / "run"), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = PageReader(Path(json.loads(ended.stdout)["report"]).read_text())
    assert "finished" in found.text and "Quarantined rows" in found.text and "no field 'text'" in found.text
    assert found.data["charts"]["loss"]["series"][0]["x"]["step"] == [1, 2, 3]
