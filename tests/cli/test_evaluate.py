"""``shoal evaluate``: the loss that the run itself saw, in any layout; and on any text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Train

from shoal.cli.main import main

Output = pytest.CaptureFixture[str]


def shoal(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def losses(capsys: Output, *arguments: object) -> dict[str, Any]:
    assert shoal(*arguments, "--json") == 0
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)["sets"]}


def test_a_runs_own_validation_loss_and_other_texts(
    train: Train, corpus: Path, tmp_path: Path, capsys: Output
) -> None:
    run = train("run", recipe__steps=2, data__heldout=0.2, evaluate__batches=1000)
    capsys.readouterr()
    seen = run.rows[-1]["heldout_loss"]
    for layout in ("dp=1", "tp=2"):
        own = losses(capsys, run.directory.path, "--layout", layout)["validation"]
        assert own["loss"] == pytest.approx(seen, rel=1e-5) and own["samples"] > 1
    (tmp_path / "other.txt").write_text("0123456789 " * 200)
    sets = losses(capsys, run.directory.path, "--data", f"words={corpus}", "--data", tmp_path / "other.txt")
    assert list(sets) == ["words", "other"]
    assert sets["other"]["loss"] > sets["words"]["loss"]  # digits were never seen
    assert shoal(run.directory.path, "--samples", 2) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "validation"
    with pytest.raises(SystemExit):
        main(["checkpoint", "export", str(run.directory.path), "--to", "hf", str(tmp_path / "hf")])
    capsys.readouterr()
    cache = f"data.cache={tmp_path / 'cache'}"
    exported = losses(
        capsys, tmp_path / "hf", "--data", f"words={corpus}", "--set", "recipe.seq=32", "--set", cache
    )
    assert exported["words"]["loss"] == pytest.approx(sets["words"]["loss"], rel=1e-5)
    assert shoal(tmp_path / "hf") == 2 and shoal(tmp_path / "none") == 2
