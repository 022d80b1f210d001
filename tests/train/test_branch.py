"""A run goes on: more steps, a branch from a checkpoint; and the same run where it can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Run, Train

from shoal.cli.main import main
from shoal.launch.report import FINISHED, Report
from shoal.train.files import read_rows
from shoal.train.run_directory import RunDirectory

Settings = Callable[..., list[str]]
Output = pytest.CaptureFixture[str]


@pytest.fixture
def shoal(settings: Settings, tmp_path: Path) -> Callable[..., int]:
    def run(name: str, *words: object, **overrides: Any) -> int:
        sets = [word for one in settings(**overrides) for word in ("--set", one)]
        with pytest.raises(SystemExit) as ended:
            main(["train", *sets, "--layout", "dp=1", "--run", str(tmp_path / name), *map(str, words)])
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return run


def left(path: Path) -> Run:
    return Run(Report(FINISHED, path, 0, "", None, None))


OPTIONS = {"recipe__warmup": "50%", "checkpoint__every": 2, "checkpoint__keep": 9, "recipe__dropout": 0.1}


def test_more_steps_before_the_decay_are_the_same_run(
    shoal: Callable[..., int], train: Train, tmp_path: Path, capsys: Output
) -> None:
    """Warm-up stays the two steps that it was, though half of eight would be four."""
    options = {**OPTIONS, "recipe__schedule": "constant"}
    assert shoal("run", recipe__steps=4, **options) == 0
    assert shoal("run", recipe__steps=8, **options) == 2
    told = capsys.readouterr().err
    assert "another run: recipe.steps was 4, now 8" in told and "fix: --extend" in told
    assert told.count("error:") == 1  # warm-up and decay are shares of the steps
    assert shoal("run", "--extend", recipe__steps=8, **options) == 0
    assert "from 4 to 8 steps: the same run" in capsys.readouterr().err
    extended = left(tmp_path / "run")
    whole = train("whole", **{**options, "recipe__steps": 8, "recipe__warmup": 2})
    assert extended.hexes == whole.hexes and len(extended.rows) == 8
    assert extended.tensors() == whole.tensors()
    # Once it has been extended, the same command finds it finished; and fewer steps are refused.
    assert shoal("run", "--extend", recipe__steps=8, **options) == 0
    assert "already finished: 8 steps" in capsys.readouterr().out
    assert shoal("run", "--extend", recipe__steps=6, **options) == 2
    assert "has 8 steps already, recipe.steps is 6" in capsys.readouterr().err


def test_past_the_decay_a_longer_run_branches_before_it(
    shoal: Callable[..., int], train: Train, tmp_path: Path, capsys: Output
) -> None:
    options = {**OPTIONS, "recipe__schedule": "wsd", "recipe__warmup": 2, "recipe__decay": 3}
    assert shoal("run", recipe__steps=8, **options) == 0
    before = left(tmp_path / "run")
    capsys.readouterr()
    assert shoal("run", "--extend", recipe__steps=12, **options) == 0
    told = capsys.readouterr().err
    assert "decays from step 5 on" in told and "run-12, from step 4" in told
    longer = left(tmp_path / "run-12")
    whole = train("whole", **{**options, "recipe__steps": 12})
    assert longer.hexes == whole.hexes and longer.tensors() == whole.tensors()
    # The old one is what it was.
    assert left(tmp_path / "run").hexes == before.hexes
    assert RunDirectory(tmp_path / "run").step() == 8
    assert shoal("run", "--extend", recipe__steps=12, **options) == 0  # the same command finds it finished


def test_a_schedule_that_decays_from_the_start_cannot_be_extended(
    shoal: Callable[..., int], tmp_path: Path, capsys: Output
) -> None:
    options = {**OPTIONS, "recipe__schedule": "cosine", "recipe__warmup": 1}
    assert shoal("run", recipe__steps=4, **options) == 0
    assert shoal("run", "--extend", recipe__steps=8, **options) == 2
    assert "decays from step 1 on, and there is no checkpoint before" in capsys.readouterr().err
    assert shoal("none", "--extend", recipe__steps=8, **options) == 2
    assert not (tmp_path / "none").exists()


def test_a_branch_from_any_checkpoint(
    shoal: Callable[..., int], train: Train, tmp_path: Path, capsys: Output
) -> None:
    """With another rate from there on: the same first steps, other later ones."""
    options = {**OPTIONS, "recipe__schedule": "constant", "recipe__warmup": 2, "recipe__steps": 6}
    assert shoal("run", **options) == 0
    start = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert shoal("same", "--branch", start, **options) == 0
    assert left(tmp_path / "same").hexes == left(tmp_path / "run").hexes
    assert left(tmp_path / "same").tensors() == left(tmp_path / "run").tensors()
    other = {**options, "recipe__lr": 1e-4}
    assert shoal("other", "--branch", start, **other) == 0
    first, second = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("run", "other"))
    assert [row["loss"] for row in first[:5]] == [row["loss"] for row in second[:5]]
    assert first[5]["loss"] != second[5]["loss"] and second[4]["lr"] == 1e-4
    weights = [
        left(tmp_path / name).checkpoint().tensor("weight", "model.norm.weight") for name in ("run", "other")
    ]
    assert not torch.equal(*weights)
    # The same command finds it finished; no other branch goes on in its place.
    assert shoal("other", "--branch", start, **other) == 0
    capsys.readouterr()
    for place, name in ((start, "run"), (start.with_name("step-00000002"), "other")):
        assert shoal(name, "--branch", place, **other) == 2
        told = capsys.readouterr().err
        assert f"{tmp_path / name} holds another run" in told and "--run DIR" in told
    # Without --branch it goes on as any run.
    assert shoal("other", **other) == 0
    for words, reason in (
        ({"recipe__batch": 4}, "recipe.batch = 8, this job 4"),
        ({"recipe__optimizer": "sgd"}, "recipe.optimizer"),
        ({"recipe__steps": 4}, "--set recipe.steps=8"),
        ({"model__path": "", "model__preset": "tiny"}, "is of another model"),
    ):
        capsys.readouterr()
        assert shoal("bad", "--branch", start, **{**options, **words}) == 2
        assert reason in capsys.readouterr().err
        assert not (tmp_path / "bad").exists()
