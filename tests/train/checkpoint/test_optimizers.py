"""Whatever an optimizer keeps: any layout continues what any other wrote, as if it had never stopped."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.train.checkpoint.shapes import small

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.recipe import Recipe
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import piece_slices
from shoal.parallel.signed_store import SignedStore
from shoal.train.checkpoint.read import Checkpoint, Wanted
from shoal.train.checkpoint.save import Saver
from shoal.train.checkpoint.storage import DirectoryStorage
from shoal.train.optimizer import LossScale, clip_and_update
from shoal.train.program import assemble, blueprint
from shoal.train.run_directory import resolved_recipe
from shoal.train.state import State


def _continue(
    rank: int, world: int, layout: str, model: str, options: dict[str, Any], path: Path, done: int, steps: int
) -> None:
    """Updates ``done`` + 1 to ``steps``, from the checkpoint of the first and into that of the last."""
    shape, recipe = small(model), Recipe(**{"precision": "fp64", "seq": 8, "lr": 1e-2, **options})
    mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"))
    tune = TuneSection(bucket_mb=0.01)
    step = assemble(blueprint(shape, recipe), recipe, tune, mesh, partial(fill, model=shape, seed=0))
    state = State(shape, step.placed, step.optimizer, recipe, LossScale(), mesh)
    if done:
        assert state.restore(Checkpoint(DirectoryStorage(path), done)) == done
        state.settle()
    for number in range(done + 1, steps + 1):
        for piece in step.pieces:
            found = torch.empty_like(piece.tensor)
            fill([(piece.name, part) for part in piece_slices(piece, found)], shape, seed=number)
            found = found.bfloat16() if recipe.precision == "bf16" else found
            piece.tensor.grad = found.detach().to(piece.tensor.grad_dtype)
        clip_and_update(step.optimizer, step.pieces, torch.tensor(1.0), 0.0, math.inf, number)
        if step.average is not None:
            step.average.follow(torch.tensor(False))
        step.placed.after_update()
    saver = Saver("disk", DirectoryStorage(path), state.new_stage(), mesh, "test")
    if world > 1:
        saver.store = SignedStore(torch.distributed.distributed_c10d._get_default_store(), b"s" * 32)
    identity = {f"recipe.{name}": value for name, value in resolved_recipe(recipe).items()}
    saver.start(state.manifest(steps, steps * recipe.batch, identity), state.states())
    saver.finish()
    assert [saved.error for saved in saver.take_results()] == [""]
    if world > 1:
        torch.distributed.barrier()


def contents(path: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    checkpoint = Checkpoint(DirectoryStorage(path), step)
    found = {}
    for piece in checkpoint.manifest.pieces:
        shape = checkpoint.manifest.shape_of(piece.state, piece.tensor)
        assert shape is not None
        key = piece.state, piece.tensor
        if key not in found:
            found[key] = torch.zeros(shape, dtype=torch.float64)
            checkpoint.read([Wanted(*key, (0,) * len(shape), found[key])])
    return found


CASES = [
    ("muon", "tiny", ["fsdp=3,zero=2", "tp=2,fsdp=2", "pp=2,tp=2"]),
    ("adafactor", "tiny", ["fsdp=3,zero=2", "tp=4", "pp=2,dp=2"]),
    ("lion", "gpt2", ["fsdp=4", "dp=2,fsdp=2,zero=1"]),
    ("adafactor", "gpt2", ["dp=2,fsdp=2,zero=1", "tp=2,fsdp=2"]),
    ("muon", "pythia-6.9b", ["fsdp=4", "tp=2"]),
]
OF_EXPERTS = [
    ("adafactor", "mixtral-8x7b", ["fsdp=4,ep=2", "dp=2,fsdp=2,zero=1,ep=4", "dp=2,tp=2,ep=2"]),
    ("muon", "mixtral-8x7b", ["fsdp=4,ep=2", "dp=2,fsdp=2,zero=1,ep=4"]),
]


@pytest.mark.parametrize(
    ("optimizer", "model", "layouts"),
    [*CASES, *(pytest.param(*one, marks=pytest.mark.long) for one in OF_EXPERTS)],
)
def test_any_layout_continues_what_any_other_wrote(
    optimizer: str, model: str, layouts: list[str], tmp_path: Path
) -> None:
    options = {"optimizer": optimizer, "ema": 0.9 if optimizer != "muon" else 0.0}
    run_ranks(1, _continue, "dp=1", model, options, tmp_path / "alone", 0, len(layouts))
    for number, layout in enumerate(layouts):
        world = Layout.parse(layout).world
        run_ranks(world, _continue, layout, model, options, tmp_path / "moved", number, number + 1)
    alone, moved = (contents(tmp_path / name, len(layouts)) for name in ("alone", "moved"))
    assert alone.keys() == moved.keys()
    for key, values in alone.items():
        assert torch.allclose(moved[key], values, rtol=1e-11, atol=1e-13), key


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("tiny", ["fsdp=3,zero=2", "tp=2,fsdp=2", "dp=2", "pp=2,fsdp=2,zero=1"]),
        ("gpt2", ["dp=2,fsdp=2,zero=1", "tp=2,fsdp=2", "fsdp=3"]),
        pytest.param(
            "mixtral-8x7b",
            ["fsdp=4,ep=2", "dp=2,fsdp=2,zero=1,ep=4", "dp=2,tp=2,ep=2"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_states_in_8_bits_are_the_same_to_the_bit_in_every_layout(
    model: str, layouts: list[str], tmp_path: Path
) -> None:
    """Given the same gradients: weights, codes and scales, each layout from what the one before wrote."""
    options = {"precision": "bf16", "states": "int8", "ema": 0.9}
    run_ranks(1, _continue, "dp=1", model, options, tmp_path / "alone", 0, len(layouts))
    for number, layout in enumerate(layouts):
        world = Layout.parse(layout).world
        run_ranks(world, _continue, layout, model, options, tmp_path / "moved", number, number + 1)
    alone, moved = (contents(tmp_path / name, len(layouts)) for name in ("alone", "moved"))
    assert alone.keys() == moved.keys()
    assert {"exp_avg", "exp_avg_sq_scale", "ema"} <= {state for state, _ in alone}
    for key, values in alone.items():
        assert torch.equal(moved[key], values), key
    assert (
        sum(piece.bytes for piece in Checkpoint(DirectoryStorage(tmp_path / "moved"), 1).manifest.pieces) > 0
    )


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("tiny", ["fsdp=3,zero=2", "tp=2,fsdp=2", "dp=2", "pp=2,fsdp=2,zero=1"]),
        ("gpt2", ["dp=2,fsdp=2,zero=1", "tp=2,fsdp=2"]),
    ],
)
def test_frozen_weights_are_kept_and_have_no_states(model: str, layouts: list[str], tmp_path: Path) -> None:
    """Half of a fused projection of GPT-2's is frozen, and rests in another precision than the rest of it."""
    groups = [{"match": "*.k_proj.*", "frozen": True}, {"match": "*embed*", "frozen": True}]
    options = {"precision": "bf16", "groups": groups}
    run_ranks(1, _continue, "dp=1", model, options, tmp_path / "alone", 0, len(layouts))
    for number, layout in enumerate(layouts):
        world = Layout.parse(layout).world
        run_ranks(world, _continue, layout, model, options, tmp_path / "moved", number, number + 1)
    first = contents(tmp_path / "moved", 1)
    alone, moved = (contents(tmp_path / name, len(layouts)) for name in ("alone", "moved"))
    assert alone.keys() == moved.keys()
    for key, values in alone.items():
        assert torch.allclose(moved[key], values, rtol=1e-5, atol=1e-7), key
    still = {name for state, name in alone if "embed" in name or "wte" in name or "wpe" in name}
    assert still
    for name in still:
        assert torch.equal(moved["weight", name], first["weight", name])
        assert ("exp_avg", name) not in moved
