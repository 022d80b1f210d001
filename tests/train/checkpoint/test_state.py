"""Checkpoints: Hugging Face's names and shapes, every byte checked, committed or not there."""

from __future__ import annotations

import json
import random
import resource
from pathlib import Path

import pytest
import torch
from tests.train.checkpoint.shapes import small
from tests.train.checkpoint.states import commit, make_state
from transformers import AutoConfig, AutoModelForCausalLM

from shoal.facts.model import Model
from shoal.facts.model.huggingface import write_config
from shoal.facts.model.parameters import parameters
from shoal.facts.recipe import Recipe
from shoal.models.decoder import build
from shoal.train.checkpoint.manifest import Damaged, Manifest, parse_manifest
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.retention import Keeper
from shoal.train.checkpoint.storage import UNFINISHED, DirectoryStorage


def read_manifest(checkpoint: Path) -> Manifest:
    return parse_manifest((checkpoint / "manifest.json").read_bytes(), "manifest")


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
    assert after.restore(Checkpoint(path)) == 12
    for piece, other in zip(before.pieces, after.pieces, strict=True):
        mine, theirs = before.optimizer.state[piece.tensor], after.optimizer.state[other.tensor]
        assert piece.name == other.name
        assert torch.equal(piece.tensor, other.tensor)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(mine[key], theirs[key]), (piece.name, key)


@pytest.mark.parametrize(
    "momentum,steps,kinds", [(0.9, 2, {"momentum_buffer"}), (0.0, 2, set()), (0.9, 0, {"momentum_buffer"})]
)
def test_only_states_that_exist_are_written(
    tmp_path: Path, momentum: float, steps: int, kinds: set[str]
) -> None:
    recipe = Recipe(optimizer="sgd", momentum=momentum)
    before = make_state(small("tiny"), steps=steps, recipe=recipe)
    path = commit(before, tmp_path, 1, 8, {})
    assert Checkpoint(path).states == {"weight"} | kinds
    after = make_state(small("tiny"), seed=1, steps=0, recipe=recipe)
    after.restore(Checkpoint(path))
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
    for file in ("rank-00000.bin", "manifest.json"):
        original = (saved / file).read_bytes()
        for _ in range(40):
            content = bytearray(original)
            content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
            (saved / file).write_bytes(content)
            with pytest.raises(Damaged):
                Checkpoint(saved).verify()
        (saved / file).write_bytes(original)
    Checkpoint(saved).verify()


def test_truncated_missing_and_planted_files_are_refused(saved: Path) -> None:
    pieces = saved / "rank-00000.bin"
    content = pieces.read_bytes()
    pieces.write_bytes(content[:-1])
    with pytest.raises(Damaged, match="bytes, and"):
        Checkpoint(saved).verify()
    pieces.unlink()
    with pytest.raises(Damaged, match="is missing"):
        Checkpoint(saved).verify()
    pieces.write_bytes(content)
    manifest = read_manifest(saved)
    stray = manifest.pieces[0].model_copy(update={"file": "../rank-00000.bin"})
    (saved / "manifest.json").write_text(manifest.model_copy(update={"pieces": (stray,)}).to_text())
    with pytest.raises(Damaged, match="outside the checkpoint"):
        Checkpoint(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(Damaged, match=r"manifest\.json is missing"):
        Checkpoint(saved)


def test_a_failed_write_leaves_the_commits_that_were_there(saved: Path) -> None:
    checkpoints = saved.parent
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="disk is full"):
            commit(make_state(small("tiny")), checkpoints, 8, 64, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert DirectoryStorage(checkpoints).committed() == [7]
    assert list(checkpoints.glob(UNFINISHED + "*")) == []
    Checkpoint(saved).verify()


def test_tidy_keeps_the_last_and_clears_what_crashes_left(tmp_path: Path) -> None:
    state = make_state(small("tiny"))
    for step in (1, 2, 3, 10):
        commit(state, tmp_path, step, step, {})
    (tmp_path / f"{UNFINISHED}step-00000011-dead").mkdir()
    place = DirectoryStorage(tmp_path)
    place.clear()
    Keeper(place, keep=2).tidy()
    assert place.committed() == [3, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_no_pickle_is_written(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["manifest.json", "rank-00000.bin"]
    size = sum(piece.bytes for piece in read_manifest(saved).pieces)
    assert (saved / "rank-00000.bin").stat().st_size == size
