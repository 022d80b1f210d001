"""``shoal evaluate``: the loss that the run itself saw, in any layout; and on any text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import Train

from shoal.cli.main import main
from shoal.train.checkpoint.read import Checkpoint

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
        own = losses(capsys, run.directory.path, "--layout", layout)["heldout"]
        assert own["loss"] == pytest.approx(seen, rel=1e-5) and own["samples"] > 1
    (tmp_path / "other.txt").write_text("0123456789 " * 200)
    sets = losses(capsys, run.directory.path, "--data", f"words={corpus}", "--data", tmp_path / "other.txt")
    assert list(sets) == ["words", "other"]
    assert sets["other"]["loss"] > sets["words"]["loss"]  # digits were never seen
    assert shoal(run.directory.path, "--samples", 2) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "heldout"
    with pytest.raises(SystemExit):
        main(["checkpoint", "export", str(run.directory.path), "--to", "hf", str(tmp_path / "hf")])
    capsys.readouterr()
    cache = f"data.cache={tmp_path / 'cache'}"
    exported = losses(
        capsys, tmp_path / "hf", "--data", f"words={corpus}", "--set", "recipe.seq=32", "--set", cache
    )
    assert exported["words"]["loss"] == pytest.approx(sets["words"]["loss"], rel=1e-5)
    assert shoal(tmp_path / "hf") == 2 and shoal(tmp_path / "none") == 2


def test_a_named_set_alone_is_evaluated_and_a_runs_own_sets_by_name(
    train: Train, corpus: Path, tmp_path: Path, capsys: Output
) -> None:
    (tmp_path / "digits.txt").write_text("0123456789 " * 200)
    run = train(
        "mixed",
        recipe__steps=2,
        data__mix=f'[{{source="{corpus}"}}]',
        data__heldout=0.2,
        evaluate__batches=1000,
        evaluate__source=f'{{digits="{tmp_path / "digits.txt"}"}}',
    )
    capsys.readouterr()
    own = losses(capsys, run.directory.path)
    assert list(own) == ["heldout", "digits"]
    seen = run.rows[-1]["validation"]
    assert {name: one["loss"] for name, one in own.items()} == pytest.approx(seen, rel=1e-5)
    named = losses(capsys, run.directory.path, "--data", f"x={tmp_path / 'digits.txt'}")
    assert named["x"]["loss"] == pytest.approx(own["digits"]["loss"], rel=1e-5)
    assert shoal(run.directory.path, "--data", f"x={tmp_path / 'none.txt'}") == 2
    said = capsys.readouterr().err
    assert "--data" in said and "data.source" not in said and "stdlib" not in said


def test_the_average_of_the_weights_is_evaluated_written_with_and_exported(
    train: Train, tmp_path: Path, capsys: Output
) -> None:
    options = {"recipe__steps": 3, "recipe__ema": 0.9, "data__heldout": 0.2, "evaluate__batches": 1000}
    run = train("average", evaluate__ema=True, **options)
    path = run.directory.path
    capsys.readouterr()
    loss = losses(capsys, path)["heldout"]["loss"]
    assert loss == pytest.approx(run.rows[-1]["heldout_loss"], rel=1e-5)
    plain = losses(capsys, path, "--set", "evaluate.ema=false")["heldout"]["loss"]
    assert abs(plain - loss) > 1e-3
    stored = Checkpoint(path / "checkpoints" / "step-00000003")
    for flags, state in (((), "weight"), (("--ema",), "ema")):
        with pytest.raises(SystemExit):
            main(["checkpoint", "export", str(path), "--to", "hf", str(tmp_path / state), *flags])
        written = load_file(tmp_path / state / "model.safetensors")
        assert all(torch.equal(tensor, stored.tensor(state, name)) for name, tensor in written.items())
    texts = []
    for arguments in ((path, "--ema"), (tmp_path / "ema",), (path,)):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["generate", str(arguments[0]), "the", "--tokens", "16", "--json", *arguments[1:]])
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(tmp_path / "ema"), "the", "--ema"])
    assert ended.value.code == 2 and "no average" in capsys.readouterr().err
    bare = train("plain", recipe__steps=1).directory.path
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "export", str(bare), "--to", "hf", str(tmp_path / "no"), "--ema"])
    assert ended.value.code == 2 and "recipe.ema" in capsys.readouterr().err
