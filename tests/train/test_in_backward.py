"""Updates in the backward pass: the same weights as with updates after it, and no gradients that are left."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.predict.counted import ask
from tests.ranks import run_ranks
from torch import Tensor

from shoal.facts.config import Config, TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.facts.support import missing
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import Shard
from shoal.prove.dryrun import dryrun
from shoal.train.data.loader import Batch
from shoal.train.in_backward import UpdatesInBackward
from shoal.train.program import assemble, blueprint
from shoal.train.step import Step

SEQ, STEPS = 16, 3
SHAPE = PRESETS["tiny"].model_copy(
    update={"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 60}
)


def made(layout: str, rank: int, early: bool, recipe: dict[str, Any], tied: bool) -> Step:
    model = SHAPE.model_copy(update={"tied": tied})
    asked = Recipe(**{"seq": SEQ, "batch": 4, "steps": 10, "precision": "fp64", "clip": 0.0, **recipe})
    tune = TuneSection(optimizer_in_backward=early, bucket_mb=0.02)
    mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"))
    return assemble(blueprint(model, asked), asked, tune, mesh, partial(fill, model=model, seed=0))


def batch(step: Step, number: int) -> Batch:
    rows = torch.cat([torch.tensor(list(one)) for one in step.mesh.layout.positions(4, step.mesh.data_index)])
    tokens = (torch.arange(SEQ) * 7 + rows[:, None] * 13 + number) % SHAPE.vocab
    positions = torch.arange(SEQ).expand(len(rows), SEQ).contiguous()
    return Batch(tokens, tokens.roll(-1, 1), positions, None, rows, tokens.numel())


def run(step: Step) -> tuple[list[tuple[float, float]], list[Tensor]]:
    seen = []
    for number in range(1, STEPS + 1):
        result = step(number, [batch(step, number)], 4 * SEQ)
        assert result.updated
        seen.append((result.loss, result.grad_norm))
    states = [
        value.detach().double().reshape(-1).clone()
        for piece in step.pieces
        for value in (piece.tensor, *(one for _, one in sorted(step.optimizer.state[piece.tensor].items())))
    ]
    return seen, states


def _compare(rank: int, world: int, layout: str, recipe: dict[str, Any], tied: bool) -> None:
    (losses, wanted), (seen, found) = (
        run(made(layout, rank, early, recipe, tied)) for early in (False, True)
    )
    assert len(wanted) == len(found)
    for one, other in zip(losses, seen, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-12)
        # Of narrow gradients norms are added up in another order.
        assert one[1] == pytest.approx(other[1], rel=1e-12 if "precision" not in recipe else 1e-5)
    for one, other in zip(wanted, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("layout", "recipe", "tied"),
    [
        ("dp=1", {}, False),
        ("dp=1", {"optimizer": "lion"}, True),
        ("dp=1", {"precision": "bf16"}, False),
        ("dp=1", {"precision": "bf16", "states": "int8"}, False),
        ("tp=2", {}, True),
        ("fsdp=2", {}, False),
        ("fsdp=2,tp=2", {"precision": "fp32"}, True),
        ("dp=2,fsdp=2", {}, False),
        ("fsdp=4,zero=2", {}, False),
        ("fsdp=2,zero=2", {"optimizer": "sgd"}, True),
    ],
)
def test_it_is_the_same_update(layout: str, recipe: dict[str, Any], tied: bool) -> None:
    run_ranks(Layout.parse(layout).world, _compare, layout, recipe, tied)


def test_gradients_never_all_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    take = UpdatesInBackward.take

    def counting(self: UpdatesInBackward, piece: Shard, found: Tensor) -> None:
        alive.append(sum(one.held.parameter.grad is not None for one in self.pieces))
        take(self, piece, found)

    monkeypatch.setattr(UpdatesInBackward, "take", counting)
    step = made("dp=1", 0, True, {}, False)
    step(1, [batch(step, 1)], 4 * SEQ)
    assert alive == [1] * len(step.pieces)
    assert all(one.tensor.grad is None and one.held.parameter.grad is None for one in step.pieces)


@pytest.mark.parametrize(
    ("layout", "changes", "recipe"),
    [
        ("micro=4", {"layers": 3}, {}),
        ("micro=4", {"layers": 3}, {"precision": "bf16"}),
        ("fsdp=2", {"layers": 3}, {"precision": "bf16"}),
        ("fsdp=2,zero=2", {"layers": 3}, {}),
        ("tp=2", {"layers": 3}, {}),
    ],
)
def test_it_costs_what_is_predicted(layout: str, changes: dict[str, Any], recipe: dict[str, Any]) -> None:
    tune = {"optimizer_in_backward": True}
    workload = ask(layout, changes, tune, clip=0.0, **recipe)
    assert dryrun(workload, 0).differences(0) == []
    assert workload.tune.optimizer_in_backward


@pytest.mark.parametrize(
    ("layout", "tables", "what"),
    [
        ("dp=1", {"recipe": {"clip": 1.0}}, "recipe.clip = 1, which needs the norm"),
        ("micro=1", {}, "micro-batches a step"),
        ("dp=2", {}, "dp=2, which keeps all gradients"),
        ("fsdp=2,zero=1", {}, "zero=1, which keeps all gradients"),
        ("dp=1", {"fault": {"nonfinite": "skip"}}, "cannot be taken back"),
        ("offload=optimizer", {}, "offload=optimizer"),
    ],
)
def test_what_it_does_not_go_with_is_named(layout: str, tables: dict[str, Any], what: str) -> None:
    given = {
        "recipe": {"clip": 0.0, **tables.get("recipe", {})},
        "fault": {"nonfinite": "stop", **tables.get("fault", {})},
        "tune": {"optimizer_in_backward": True},
    }
    (problem,) = missing(Config.model_validate(given), PRESETS["tiny"], Layout.parse(layout))
    assert what in problem.what and problem.fix
