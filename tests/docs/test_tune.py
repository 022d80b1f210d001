"""The command of docs/tune.md as it stands there, but small; its words are the code's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.docs.shown import words_of

from shoal.cli.main import main
from shoal.facts.calibration import file
from shoal.launch.tuning import record

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tune.md").read_text(encoding="utf-8")
COMMAND = words_of("docs/tune.md", "shoal tune examples/tiny.toml")


def shoal(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(str(ended.value.code))


def test_the_command(
    tmp_path: Path,
    small_model: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(file.VARIABLE, str(tmp_path / "cached"))
    program, *words = COMMAND
    assert program == "shoal"
    words[words.index("examples/tiny.toml")] = str(ROOT / "examples" / "tiny.toml")
    small = {
        "model.path": small_model,
        "data.source": corpus,
        "data.cache": tmp_path / "cache",
        "recipe.seq": 32,
        "recipe.batch": 8,
        "recipe.steps": 60,
        "evaluate.every": 0,
    }
    words += [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    run = tmp_path / "run"
    assert shoal(*words, "--run", str(run)) == 0
    told = capsys.readouterr()
    assert re.search(r"^ +predicted +measured +steps +layout", told.out, re.MULTILINE)
    for beginning in ("chosen: ", "cost: ", "gain over fsdp=2,pp=2,micro=1,recompute=full: "):
        assert re.search(f"^{beginning}", told.out, re.MULTILINE), told.out
    assert "tuning: fsdp=2,pp=2,micro=1,recompute=full: " in told.err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 61))
    # Finished, and asked again for a program to read.
    assert shoal(*words, "--run", str(run), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == 0 and found["chosen"] == rows[-1]["layout"]
    json_words = PAGE.partition("With `--json`")[2].partition("## ")[0]
    named = set(re.findall(r"[a-z_]+", json_words))
    for part in (found, *found["layouts"], *found["moves"], found["cost"], found["gain"]):
        fields = part.keys() - {"run", "step", "steps", "exit_code", "message"}
        assert fields <= named, fields - named


def test_the_kinds_of_rows() -> None:
    table = PAGE.partition("## `tuning.jsonl`")[2]
    listed = re.findall(
        r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    )
    kinds = (record.BEGIN, record.MEASURED, record.MOVE, record.MOVED, record.FAILED, record.DECIDED)
    assert listed == [*kinds]


@pytest.mark.parametrize(
    "words,said",
    [
        (("--set", "recipe.steps=11"), "recipe.steps = 11 is too few to try layouts"),
        (
            ("--set", "server.servers=1", "--layout", "dp=2", "--set", "cluster.on=2xcpu"),
            "no parameter server",
        ),
        (("--set", "cluster.on=1xcpu", "--set", "recipe.batch=1"), "the only layout that is legal here"),
        (("--layouts", "dp=2;tp=3", "--set", "cluster.on=2xcpu"), "layout tp=3 is not legal here"),
        (("--layouts", "dp=2", "--set", "cluster.on=2xcpu"), "one layout only, dp=2"),
        (("--layouts", ";"), "--layouts is empty"),
        (("--most", "1"), "--most 1: nothing to compare"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    places = ("--set", f"data.source={corpus}", "--set", f"data.cache={cache}", "--run", str(run))
    assert shoal("tune", *words, *places) == 2
    assert said in capsys.readouterr().err and not run.exists()
    assert shoal("tune", *words, *places, "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and any(said in one["what"] for one in told["problems"])


def test_nodes_are_refused(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--set", f"data.source={corpus}", "--set", "cluster.on=4xcpu", "--set", "tune.search=true")
    assert shoal("train", *words, "--nodes", "2", "--run", str(tmp_path / "run")) == 2
    assert "layouts are tried on one machine" in capsys.readouterr().err
