"""Checkpoints: Hugging Face's names and shapes, every byte checked, committed or not there."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shoal.facts.config import TuneSection
from shoal.facts.huggingface import write_config
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.parameters import parameters
from shoal.facts.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.models.decoder import build
from shoal.models.initial import fill
from shoal.parallel.apply import apply
from shoal.parallel.mesh import Mesh
from shoal.train import optimizer as optimizers
from shoal.train.checkpoint.directory import UNFINISHED, committed, latest, tidy
from shoal.train.checkpoint.manifest import Damaged, read_manifest
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.optimizer import LossScale
from shoal.train.state import State

NARROW = {"layers": 2, "hidden": 32, "heads": 4, "head_dim": 8, "ffn": 48, "vocab": 61, "max_positions": 64}


def small(preset: str) -> Model:
    kv_heads = 4 if preset in ("gpt2", "pythia-6.9b") else 2
    return PRESETS[preset].model_copy(
        update={**NARROW, "kv_heads": kv_heads, "name": preset, "window_layers": None}
    )


def make_state(model: Model, seed: int = 0, steps: int = 2, recipe: Recipe | None = None) -> State:
    """A network after a few updates, so that optimizer states hold something."""
    recipe = recipe or Recipe()
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    placed = apply(build(model), mesh, TuneSection(), partial(fill, model=model, seed=seed), seq=10)
    pieces = placed.gradients.pieces
    optimizer = optimizers.build(pieces, recipe)
    for step in range(steps):
        for number, piece in enumerate(pieces):
            piece.tensor.grad = torch.full_like(piece.tensor, 0.1 * (number + step + 1))
        optimizer.step()
    return State(model, placed, optimizer, recipe.optimizer, LossScale(), mesh)


def commit(state: State, checkpoints: Path, step: int, samples: int, identity: dict[str, Any]) -> Path:
    state.commit(checkpoints, step, samples, identity)
    path = latest(checkpoints)
    assert path is not None
    return path


@pytest.fixture(params=["tiny", "qwen2-7b", "qwen3-8b", "gpt2", "pythia-6.9b"])
def model(request: pytest.FixtureRequest) -> Model:
    return small(request.param)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return commit(make_state(small("tiny")), tmp_path, 7, 56, {"recipe.lr": 0.1})


def test_a_checkpoint_brings_back_every_bit(model: Model, tmp_path: Path) -> None:
    before = make_state(model)
    path = commit(before, tmp_path, 12, 96, {})
    assert path.name == "step-00000012"
    after = make_state(model, seed=1, steps=0)
    assert after.restore(path) == 12
    for piece, other in zip(before.pieces, after.pieces, strict=True):
        mine, theirs = before.optimizer.state[piece.tensor], after.optimizer.state[other.tensor]
        assert piece.name == other.name
        assert torch.equal(piece.tensor, other.tensor)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(mine[key], theirs[key]), (piece.name, key)


@pytest.mark.parametrize(
    "momentum,steps,kinds", [(0.9, 2, {"momentum_buffer"}), (0.0, 2, set()), (0.9, 0, set())]
)
def test_only_states_that_exist_are_written(
    tmp_path: Path, momentum: float, steps: int, kinds: set[str]
) -> None:
    recipe = Recipe(optimizer="sgd", momentum=momentum)
    before = make_state(small("tiny"), steps=steps, recipe=recipe)
    path = commit(before, tmp_path, 1, 8, {})
    assert Checkpoint(path).states == {"weight"} | kinds
    after = make_state(small("tiny"), seed=1, steps=0, recipe=recipe)
    after.restore(path)
    for piece, other in zip(before.pieces, after.pieces, strict=True):
        assert torch.equal(piece.tensor, other.tensor)
        for kind in kinds:
            mine, theirs = before.optimizer.state[piece.tensor], after.optimizer.state[other.tensor]
            assert torch.equal(mine[kind], theirs[kind]), piece.name


def test_names_and_shapes_are_those_of_transformers(model: Model, tmp_path: Path) -> None:
    """The pieces of a checkpoint, loaded into transformers' own model, give our logits."""
    state = make_state(model)
    checkpoint = Checkpoint(commit(state, tmp_path / "run", 1, 8, {}))
    names = {piece.tensor for piece in checkpoint.manifest.pieces if piece.state == "weight"}
    assert names == {parameter.name for parameter in parameters(model)}
    (tmp_path / "config.json").write_text(json.dumps(write_config(model)))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    # In memory transformers calls NeoX's head lm_head; in files, as here, it is embed_out.
    tensors = {name.replace("embed_out", "lm_head"): checkpoint.tensor("weight", name) for name in names}
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert not unexpected and all("lm_head" in name or "bias" in name for name in missing)
    theirs.tie_weights()
    network = build(model).to_empty(device="cpu")
    held = {piece.name: piece.tensor for piece in state.pieces}
    for name, parameter in network.named_parameters():
        parameter.data.copy_(held[name])
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        ours = network.lm_head.logits(network(tokens, torch.arange(10).expand(2, 10)))
        assert torch.allclose(ours, theirs(tokens).logits, atol=1e-5)


def test_any_flipped_bit_is_found(saved: Path) -> None:
    Checkpoint(saved).verify()
    numbers = random.Random(0)
    for file in ("pieces-00000.bin", "manifest.json"):
        original = (saved / file).read_bytes()
        for _ in range(40):
            content = bytearray(original)
            content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
            (saved / file).write_bytes(content)
            # Between JSON's tokens a changed blank changes nothing; anywhere else it is an error.
            if file == "manifest.json" and _same_json(content, original):
                continue
            with pytest.raises(Damaged):
                Checkpoint(saved).verify()
        (saved / file).write_bytes(original)
    Checkpoint(saved).verify()


def _same_json(content: bytearray, original: bytes) -> bool:
    try:
        return json.loads(content.decode()) == json.loads(original.decode())
    except ValueError:
        return False


def test_truncated_missing_and_planted_files_are_refused(saved: Path) -> None:
    pieces = saved / "pieces-00000.bin"
    content = pieces.read_bytes()
    pieces.write_bytes(content[:-1])
    with pytest.raises(Damaged, match="ends before"):
        Checkpoint(saved).verify()
    pieces.unlink()
    with pytest.raises(Damaged, match="No such file"):
        Checkpoint(saved).verify()
    pieces.write_bytes(content)
    manifest = read_manifest(saved)
    stray = manifest.pieces[0].model_copy(update={"file": "../pieces-00000.bin"})
    (saved / "manifest.json").write_text(manifest.model_copy(update={"pieces": (stray,)}).to_text())
    with pytest.raises(Damaged, match="outside the checkpoint"):
        Checkpoint(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(Damaged, match=r"no manifest\.json"):
        Checkpoint(saved)


def test_a_failed_write_leaves_the_commits_that_were_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved.parent
    state = make_state(small("tiny"))
    whole = state._tensors

    def broken(kinds: tuple[str, ...]) -> Iterator[tuple[str, str, torch.Tensor]]:
        yield from list(whole(kinds))[:5]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "_tensors", broken)
    with pytest.raises(OSError, match="No space"):
        state.commit(checkpoints, 8, 64, {})
    assert [step for step, _ in committed(checkpoints)] == [7]
    assert list(checkpoints.glob(UNFINISHED + "*")) == []
    Checkpoint(latest(checkpoints)).verify()


def test_tidy_keeps_the_last_and_clears_what_crashes_left(tmp_path: Path) -> None:
    state = make_state(small("tiny"))
    for step in (1, 2, 3, 10):
        state.commit(tmp_path, step, step, {})
    (tmp_path / f"{UNFINISHED}step-00000011").mkdir()
    tidy(tmp_path, keep=2)
    assert [step for step, _ in committed(tmp_path)] == [3, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_no_pickle_is_written(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["manifest.json", "pieces-00000.bin"]
    size = sum(piece.bytes for piece in read_manifest(saved).pieces)
    assert (saved / "pieces-00000.bin").stat().st_size == size
