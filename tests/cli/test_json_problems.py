"""``--json`` with bad input: exactly one document on standard output, whatever is wrong, and the words for a person."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli import train as train_command
from shoal.cli.main import app, main

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, *arguments: str, code: int = 2) -> list[dict[str, str | None]]:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert caught.value.code == code
    document = json.loads(out)
    assert document.keys() == {"ok", "exit_code", "problems"}
    assert (document["ok"], document["exit_code"]) == (False, code)
    problems: list[dict[str, str | None]] = document["problems"]
    assert problems
    for problem in problems:
        assert problem.keys() == {"what", "fix", "where"}
        assert f"error: {problem['what']}" in err
    return problems


def commands_with_json() -> list[list[str]]:
    found = []
    for name in app:
        if name.startswith("-"):
            continue
        inner = [word for word in app[name] if not word.startswith("-")]
        for words in [[name, word] for word in inner] if inner else [[name]]:
            called = app[words[0]] if len(words) == 1 else app[words[0]][words[1]]
            if any("--json" in one.names for one in called.assemble_argument_collection()):
                found.append(words)
    return found


def test_the_commands_that_report_take_it() -> None:
    names = {" ".join(words) for words in commands_with_json()}
    assert {"plan", "train", "dryrun", "parity", "profile", "chaos", "doctor", "checkpoint ls"} <= names


@pytest.mark.parametrize("words", commands_with_json(), ids=" ".join)
def test_an_unknown_option(words: list[str], capsys: Capture) -> None:
    # Given without what else they need, some complain of that first.
    (problem,) = refused(capsys, *words, "--bogus=3")
    assert problem["fix"]
    assert problem["where"] in ("--bogus", "--on", "--runs", "--seq", "--batch", None)


BROKEN = '[recipe]\nlr = "fast"\nseq = 0\n'


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["train", "missing.toml"], ["missing.toml"]),
        (["train", "broken.toml"], ["broken.toml:3", "broken.toml:2"]),
        (["data", "prepare", "broken.toml"], ["broken.toml:3", "broken.toml:2"]),
        (["config", "show", "no.toml"], ["no.toml:2"]),
        (["train", "--set", "recipe.lr=x"], ["--set recipe.lr"]),
        (["train", "--set", "recipe"], ["--set recipe"]),
        (["train", "--layout", "dp=0"], ["--layout"]),
        (["parity", "--layouts", "dp=0"], ["--layouts"]),
        (["parity", "--layouts", ";"], ["--layouts"]),
        (["chaos", "--layouts", ";"], ["--layouts"]),
        (["chaos", "--kinds", "meteor", "--set", "cluster.on=8xcpu"], ["--kinds"]),
        (["plan", "tiny", "--on", "8xH10000", "--seq", "1", "--batch", "1"], ["--on"]),
        (["plan", "tiny", "--on", "local", "--seq", "many", "--batch", "1"], ["--seq"]),
        (["plan", "tiny", "--on", "local", "--seq", "8", "--batch", "8", "--top", "0"], ["--top"]),
        (["train", "--nodes", "none"], ["--nodes"]),
        (["train", "model.toml"], ["model.toml:2"]),
        (["train", "model.toml", "--set", "model.preset=none"], ["--set model.preset"]),
        (["train", "data.toml"], ["data.toml:2"]),
        (["data", "prepare", "--set", "data.source=none/*.txt"], ["--set data.source"]),
        (["train", "layout.toml"], ["layout.toml:1", "layout.toml:1"]),
        (["profile", "layout.toml"], ["layout.toml:1", "layout.toml:1"]),
        (["dryrun", "layout.toml"], ["layout.toml:1", "layout.toml:1"]),
        (["checkpoint", "verify", "nowhere"], [None]),
        (["schedule", "pp=4", "--micro-batches", "0"], ["--micro-batches"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else None,
)
def test_where_it_is(
    arguments: list[str],
    where: list[str | None],
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "broken": BROKEN,
        "no": "[recipe]\nlr 3\n",
        "model": '[model]\npreset = "nothing"\n',
        "data": '[data]\nsource = "none/*.txt"\n',
        "layout": 'layout = "dp=7"\n[cluster]\non = "8xcpu"\n',
    }.items():
        (tmp_path / f"{name}.toml").write_text(text)
    before = sorted(tmp_path.iterdir())
    assert sorted(map(str, where)) == sorted(str(one["where"]) for one in refused(capsys, *arguments))
    assert sorted(tmp_path.iterdir()) == before


def test_after_two_dashes_there_are_no_options(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["config", "show", "--", "--json"])
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 75, "stopped on request"),
        (PermissionError(13, "Permission denied", "x"), 1, "Permission denied"),
        (ZeroDivisionError("a bug"), 1, "ZeroDivisionError: a bug"),
    ],
)
def test_what_is_not_bad_input_is_told_too(
    error: BaseException, code: int, said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("shoal.facts.config.file.load", fail)
    assert train_command
    with pytest.raises(SystemExit) as caught:
        main(["train", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert caught.value.code == document["exit_code"] == code
    assert said in document["problems"][0]["what"]
