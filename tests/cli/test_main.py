"""The command line as a person and as a script meet it: exit codes, messages, JSON, and no torch before its time."""

from __future__ import annotations

import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.cli.command import Capture, shoal_

import shoal.facts
import shoal.plan
import shoal.predict
from shoal.cli.main import COMMANDS, app, main, unbroken
from shoal.facts.config import Config


@pytest.mark.parametrize(
    ("arguments", "said", "fix"),
    [
        (["bogus"], 'Unknown command "bogus"', "shoal --help"),
        (["--bogus"], "--bogus", "shoal --help"),
        (["config", "bogus"], 'Unknown command "bogus"', "shoal config --help"),
        (["config", "show", "--bogus"], "Unknown option: --bogus", "shoal config show --help"),
        (["trian"], 'Unknown command "trian"', "did you mean 'train'?"),
        (["train", "--learning_rate", "3"], "Unknown option: --learning_rate", "--set recipe.lr=…"),
        (["train", "--tensor-parallel-size=2"], "--tensor-parallel-size=2", "--layout tp=…"),
        (["train", "--epochs", "3"], "Unknown option: --epochs", "recipe.epochs"),
        (["dryrun", "tiny", "--max_seq_length", "8"], "--max_seq_length", "it is --seq here"),
        (["config", "show", "--set"], "--set requires an argument", "shoal config show --help"),
        (["config", "show", "--layout"], "--layout requires an argument", "shoal config show --help"),
        (["config", "show", "missing.toml"], "there is no config file missing.toml", "shoal init writes one"),
        (["train", "missing.toml"], "there is no config file missing.toml", "shoal init writes one"),
        (["config", "show", "."], ". is a directory, not a Shoal config", "TOML"),
        (["config", "show", "--layout", "dp=0"], "--layout: dp=0: must be a whole number", "dp=1 or more"),
        (["config", "show", "--layout", ""], "--layout: it is empty", "auto"),
        (["train", "--set", "model.preset=nothing"], "'nothing' is neither a preset", "tiny"),
        (["config", "show", "--set", "recipe.lr"], "it is not KEY=VALUE", "--set recipe.lr=0.001"),
        (["init", "no/such/place.toml"], "there is no directory no/such", "exists"),
        (["init", "x" * 300], "File name too long", "a file"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(
    arguments: list[str],
    said: str,
    fix: str,
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = shoal_(capsys, *arguments)
    assert code == 2
    assert out == ""
    message, advice = err.splitlines()
    assert message.startswith("error: ")
    assert said in message
    assert advice.startswith("  fix: ")
    assert fix in advice
    assert list(tmp_path.iterdir()) == []


def test_a_layout_that_does_not_fit_names_its_nearest(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = shoal_(capsys, "train", "--layout", "dp=7", "--set", "cluster.on=1xcpu")
    assert (code, out) == (2, "")
    reason, advice, layout, nearest = err.splitlines()
    assert reason.startswith("error: ") and "batch=16 does not divide by dp·fsdp = 7" in reason
    assert advice.startswith("  fix: ") and "recipe.batch = 14 or dp=8" in advice
    assert layout == "error: layout dp=7 is not legal here"
    assert nearest == "  fix: nearest legal layouts: dp=8; dp=4; dp=16"
    assert list(tmp_path.iterdir()) == []


def test_every_problem_has_its_line(capsys: Capture) -> None:
    code, _, err = shoal_(
        capsys, "config", "show", "--layout", "dp=0,tpp=2", "--set", "recipe.lr=x", "--json"
    )
    assert code == 2
    assert [line[:5] for line in err.splitlines()] == ["error", "  fix"] * 3


def test_text_of_a_user_is_not_markup(capsys: Capture) -> None:
    _, _, err = shoal_(capsys, "config", "show", "[bold]:smile:.toml")
    assert "[bold]:smile:.toml" in err
    _, out, _ = shoal_(capsys, "config", "show", "--set", "run.name=[red]:smile:[/red] \\")
    assert "[red]:smile:[/red]" in out


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["config"], ["config", "--help"]])
def test_what_asks_for_help_is_no_mistake(arguments: list[str], capsys: Capture) -> None:
    code, out, err = shoal_(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out


def commands() -> list[list[str]]:
    """Every command that can be called, as its words."""
    found = []
    for name in app:
        if name.startswith("-"):
            continue
        inner = app[name]
        words = [inner_name for inner_name in inner if not inner_name.startswith("-")]
        found += [[name, word] for word in words] if words else [[name]]
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_explains_itself_with_an_example(words: list[str], capsys: Capture) -> None:
    code, out, err = shoal_(capsys, *words, "--help")
    assert (code, err) == (0, "")
    assert f"Example: shoal {' '.join(words)}" in out


def test_the_list_of_commands_says_what_each_does(capsys: Capture) -> None:
    _, out, _ = shoal_(capsys, "--help")
    for words in commands():
        assert words[0] in out
    assert "Write a commented config" in out


def test_help_is_grouped_and_fits_eighty_columns(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = shoal_(capsys, "--help")
    groups = [line.split()[1] for line in out.splitlines() if line.startswith("╭─")]
    assert groups == ["Start", "Plan", "Prove", "Run", "Keep", "Options"]
    for listed in COMMANDS.values():  # a command a line: none of them is broken
        longest = max(len(name) for name, _, _ in listed)
        assert all(len(f"│ {'':{longest}}  {does} │") <= 80 for _, _, does in listed)
    _, out, _ = shoal_(capsys, "plan", "--help")
    assert max(map(len, out.splitlines())) <= 80
    # Defaults that say something.
    assert "[default: 10]" in out and "[default: fp32]" in out
    assert "default: False" not in out and "default: None" not in out


def test_paragraphs_are_broken_by_the_terminal_alone() -> None:
    docstring = """Head.

    One line
    and its next.

    Parameters
    ----------
    config
        A file
        of words.
    set
        A value.
    """
    assert unbroken(docstring).splitlines() == [
        "Head.",
        "",
        "One line and its next.",
        "",
        "Parameters",
        "----------",
        "config",
        "    A file of words.",
        "set",
        "    A value.",
    ]


def test_config_show_of_what_is_changed(capsys: Capture) -> None:
    _, out, _ = shoal_(capsys, "config", "show", "--changed")
    assert out == "nothing is changed: every value is the default\n"
    _, out, _ = shoal_(
        capsys, "config", "show", "--changed", "--set", "recipe.lr=1", "--layout", "dp=2", "--json"
    )
    assert json.loads(out) == {
        "layout": {"value": "dp=2", "origin": "--layout"},
        "recipe.lr": {"value": 1.0, "origin": "--set"},
    }


def test_config_show(capsys: Capture) -> None:
    code, out, err = shoal_(capsys, "config", "show")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["key", "value", "from", "meaning"]
    (lr,) = [line for line in lines if line.startswith("recipe.lr ")]
    assert lr.split(maxsplit=3)[:3] == ["recipe.lr", "0.01", "default"] and "peak learning rate" in lr
    # Nothing is wrapped or cut: one line a key, also where the output is narrow.
    assert all(line.split()[0].count(".") <= 2 and not line.startswith(" ") for line in lines)


def test_set_may_be_given_often_and_swallows_nothing(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "a b.toml"
    path.write_text("[recipe]\nseq = 8\n", encoding="utf-8")
    _, out, _ = shoal_(
        capsys, "config", "show", "--set", "recipe.lr=1", "--set", "recipe.batch=2", str(path), "--json"
    )
    shown = json.loads(out)
    assert shown["recipe.lr"] == {"value": 1.0, "origin": "--set"}
    assert shown["recipe.batch"] == {"value": 2, "origin": "--set"}
    assert shown["recipe.seq"] == {"value": 8, "origin": f"{path}:2"}
    assert shown["recipe.steps"] == {"value": 300, "origin": "default"}
    assert shown["run.name"] == {"value": "a b", "origin": f"the name of {path}"}


def test_layout_beats_set(capsys: Capture) -> None:
    _, out, _ = shoal_(capsys, "config", "show", "--json", "--layout", "tp=2 dp=4", "--set", "layout=dp=1")
    assert json.loads(out)["layout"] == {"value": "dp=4,tp=2", "origin": "--layout"}


def test_json_has_no_nan(capsys: Capture) -> None:
    from shoal.cli.show import print_json

    print_json({"loss": float("nan"), "rows": [(1.5, float("inf"))], "run": Path("runs/a"), "none": None})
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"loss": None, "rows": [[1.5, None]], "run": "runs/a", "none": None}


def test_init_writes_the_default_and_never_overwrites_unasked(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = shoal_(capsys, "init")
    assert (code, err) == (0, "")
    assert out == "wrote shoal.toml; edit it, then: shoal train shoal.toml\n"
    assert Config.model_validate(tomllib.loads(Path("shoal.toml").read_text("utf-8"))) == Config()

    Path("shoal.toml").write_text("mine", encoding="utf-8")
    code, out, err = shoal_(capsys, "init")
    assert (code, out) == (2, "")
    assert "shoal.toml exists" in err
    assert "--force" in err
    assert Path("shoal.toml").read_text("utf-8") == "mine"

    assert shoal_(capsys, "init", "--force")[0] == 0
    assert Path("shoal.toml").read_text("utf-8") != "mine"
    assert shoal_(capsys, "init", "my run.toml")[1].endswith("shoal train 'my run.toml'\n")
    # A link that leads nowhere is not a place to write through.
    Path("link.toml").symlink_to("elsewhere.toml")
    assert shoal_(capsys, "init", "link.toml")[0] == 2


def test_a_terminal_without_the_letters_gets_their_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with pytest.raises(SystemExit) as caught:
        main(["config", "show", "--set", "run.name=Größe 実験"])
    assert caught.value.code == 0
    assert rb"Gr\xf6\xdfe" in raw.getvalue()


def test_a_reader_that_has_seen_enough_is_no_traceback(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "from shoal.cli.main import main; main(['config', 'show'])"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


WITHOUT_TORCH = """
import importlib, sys
from shoal.cli.main import main

for words in sys.argv[1].split(";"):
    try:
        main(words.split())
    except SystemExit as leaving:
        assert leaving.code == 0, words
for module in sys.argv[2].split():
    importlib.import_module(module)
loaded = [name for name in ("torch", "numpy", "transformers") if name in sys.modules]
assert not loaded, loaded
"""


def test_planning_and_looking_never_import_torch(tmp_path: Path) -> None:
    rooms = (shoal.facts, shoal.plan, shoal.predict)
    modules = [
        module.name for room in rooms for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    ]
    assert {"shoal.facts.layout", "shoal.plan.resolve", "shoal.predict.flops"} <= set(modules)
    words = "--help;--version;config show;config show --json;config show --help;train --help;init"
    subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, words, " ".join(modules)],
        cwd=tmp_path,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def test_train_says_how_long_it_will_take_and_what_is_too_long_before_anything_runs(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Refused once the header has been printed, so nothing is started.
    given = ["train", "--set", "data.source=none.txt", "--set", "cluster.on=2xcpu", "--no-calibration"]
    _, _, err = shoal_(capsys, *given, "--set", "recipe.seq=100000", "--layout", "dp=1")
    head, warning, predicted, *_ = err.splitlines()
    assert head.startswith("tiny on cpu, layout dp=1")
    assert warning.startswith("warning: seq=100000 is longer than the 1,024 positions of tiny")
    found = re.fullmatch(r"predicted: ([\d,.]+) s/step, .+ (days|h) for 300 steps \(.+\)", predicted)
    assert found is not None, predicted
    assert float(found[1].replace(",", "")) > 100
    _, _, err = shoal_(capsys, *given)
    assert "warning" not in err and " s/step, " in err


def test_other_commands_warn_of_the_length_too(capsys: Capture) -> None:
    _, _, err = shoal_(
        capsys, "plan", "tiny", "--on", "1xH100", "--seq", "2048", "--batch", "8", "--layout", "dp=1"
    )
    assert "warning: seq=2048 is longer than the 1,024 positions of tiny" in err
