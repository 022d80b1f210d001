"""``shoal replay``: a step again is the step that was; and what was spoiled is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from tests.conftest import Run, Train
from tests.train.huggingface.models import save_random

from shoal.cli.main import main
from shoal.train.checkpoint.storage import manifest_of

Output = pytest.CaptureFixture[str]
OPTIONS: dict[str, Any] = {
    "recipe__steps": 5,
    "checkpoint__every": 2,
    "checkpoint__keep": 9,
    "recipe__dropout": 0.1,
    "recipe__lr": 1e-3,
    "cluster__on": "4xcpu",
    "fault__timeout": 120,
}


def shoal(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["replay", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def replayed(capsys: Output, code: int, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert shoal(*arguments, "--json") == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def flip(run: Run, step: int, tensor: str, bit: int) -> int:
    """A bit of a weight's last element, and the hashes that a rank would have written with it; whose file it is in."""
    place = run.directory.disk
    manifest = manifest_of(place, step)
    pieces = list(manifest.pieces)
    number = max(number for number, one in enumerate(pieces) if (one.state, one.tensor) == ("weight", tensor))
    piece = pieces[number]
    path = run.directory.checkpoints / f"step-{step:08d}" / piece.file
    content = bytearray(path.read_bytes())
    content[piece.position + piece.bytes - 4 + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    hashed = blake3(content[piece.position : piece.position + piece.bytes]).hexdigest()
    pieces[number] = piece.model_copy(update={"hash": hashed})
    changed = manifest.model_copy(update={"pieces": tuple(pieces)})
    (path.parent / "manifest.json").write_text(changed.to_text())
    return int(piece.file.removeprefix("rank-").partition(".")[0])


def test_a_step_again_is_the_step_that_was(train: Train, capsys: Output) -> None:
    """In the run's own layout to the bit, in one process within rounding; from the first weights too."""
    run = train("run", "fsdp=2,tp=2", **OPTIONS)
    own = replayed(capsys, 0, run.directory.path, "--step", 3)
    assert own["exact"] and own["same"] and own["start"] == 2 and own["checkpoint"] == 4
    assert [one["step"] for one in own["steps"]] == [3, 4] and all(one["identical"] for one in own["steps"])
    assert len(own["samples"]) == 5 and own["samples"][0]["loss"] >= own["samples"][1]["loss"]
    alone = replayed(capsys, 0, run.directory.path, "--step", 1, "--layout", "dp=1")
    assert not alone["exact"] and alone["start"] == 0 and alone["tensors"] == 0
    assert {one["row"] for one in alone["samples"]} <= set(range(8))
    assert run.directory.disk.committed() == [2, 4, 5]
    # An exponent's bit: found across layouts, with the rank that held it.
    owner = flip(run, 4, "model.layers.1.mlp.up_proj.weight", 28)
    found = replayed(capsys, 1, run.directory.path, "--step", 4, "--layout", "dp=1")
    assert found["tensors"] == 1 and found["worst"]["tensor"] == "model.layers.1.mlp.up_proj.weight"
    assert found["worst"]["rank"] == owner and found["worst"]["state"] == "weight"
    assert shoal(run.directory.path, "--step", 9) == 2
    assert "has recorded steps 1 to 5" in capsys.readouterr().err


def test_the_lowest_bit_in_strict_mode(train: Train, capsys: Output) -> None:
    run = train("run", "fsdp=2,pp=2", run__strict=True, **OPTIONS)
    owner = flip(run, 4, "model.layers.0.self_attn.k_proj.weight", 0)
    found = replayed(capsys, 1, run.directory.path, "--step", 3, "--layout", "dp=1")
    assert all(one["identical"] for one in found["steps"]) and found["exact"]
    assert found["tensors"] == 1 and found["worst"]["rank"] == owner
    assert found["worst"]["tensor"] == "model.layers.0.self_attn.k_proj.weight"
    # The run went on from what it had in memory: its next step shows that the flip was in the file alone.
    after = replayed(capsys, 1, run.directory.path, "--step", 5)
    assert not after["steps"][0]["identical"]


def test_the_first_tensor_that_is_not_finite(train: Train, tmp_path: Path, capsys: Output) -> None:
    save_random("llama", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][20, 40] = torch.inf
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    options = {**OPTIONS, "recipe__steps": 2, "model__path": "", "model__init_from": tmp_path / "model"}
    run = train("run", "fsdp=2,tp=2", **options)
    found = replayed(capsys, 1, run.directory.path, "--step", 1)
    assert found["not_finite"]["what"] == "weight"
    assert found["not_finite"]["name"] == "model.layers.1.mlp.down_proj.weight"
    assert found["not_finite"]["rank"] == 3  # of 32 rows the second half, of 48 columns too
    assert found["steps"][0]["step"] == 1 and found["steps"][0]["recorded"]["loss"] is None
