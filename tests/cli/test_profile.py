"""``shoal profile`` as a person and as a script meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.train.run_directory import RunDirectory

Settings = Callable[..., list[str]]


def shoal(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capfd.readouterr()


def given(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_json_is_all_there_is_on_standard_output(
    settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    wanted = [*given(settings()), "--layout", "pp=2", "--steps", "1", "--out", str(run)]
    code, out, err = shoal(capfd, "profile", *wanted, "--json")
    assert code == 0
    document = json.loads(out)
    assert document == json.loads(RunDirectory(run).profile.read_text())
    assert {"seconds", "compute"} <= set(document["error"]["step"])
    assert {"peak_allocated", "params"} <= set(document["error"]["memory"])
    assert {"measured", "scheduled", "apart"} <= set(document["pipeline"])
    assert {"step", "memory"} <= set(document["measured"]) & set(document["predicted"])
    assert [Path(path).is_file() for path in document["traces"]] == [True, True]
    # Nothing of the profiler's own chatter either.
    (line,) = err.splitlines()
    assert line.endswith(f" on cpu, layout pp=2, run {run}")


def test_a_person_reads_tables_and_sentences(
    settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = shoal(capfd, "profile", *given(settings()), "--steps", "1", "--out", str(tmp_path / "run"))
    assert code == 0
    first_words = [line.split("  ")[0] for line in out.splitlines()]
    for word in ("compute", "optimizer", "input wait", "host gaps", "step", "params", "peak allocated"):
        assert word in first_words, out
    assert any(line.startswith("- ") for line in out.splitlines())
    assert "exposed communication" not in out  # one rank talks to nobody


def test_help_has_an_example(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = shoal(capfd, "profile", "--help")
    assert code == 0
    assert "shoal profile examples/tiny.toml --layout fsdp=2" in out and "--out" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.toml"], "there is no config file missing.toml"),
        (["--layout", "dp=0"], "dp=0: must be a whole number"),
        (["--set", "cluster.on=8xH100", "--layout", "dp=8"], "this machine has"),
    ],
)
def test_bad_input_is_refused_with_a_fix_and_writes_nothing(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = shoal(capfd, "profile", *arguments)
    assert (code, out) == (2, "")
    assert said in err and "fix: " in err
    assert list(tmp_path.iterdir()) == []


def test_a_live_run_is_not_disturbed(
    settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.held():
        code, _, err = shoal(capfd, "profile", *given(settings()), "--out", str(run.path))
    assert code == 2
    assert "is in use by a live run" in err
