"""Stochastic rounding: whose chances are whose in every layout, what an update becomes, and that nothing is lost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.test_host_update import made, trained
from tests.train.test_other_optimizers import DENSE, EXPERTS, a_step, train
from torch import Tensor, nn

from shoal.facts.config.file import load
from shoal.facts.layout import Layout
from shoal.facts.layout.updates import Sharing, updated_ranges
from shoal.facts.model import Model
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.model.tensor_split import Box
from shoal.facts.problem import BadInput
from shoal.facts.recipe import Recipe
from shoal.models.random import bits
from shoal.plan.resolve import resolve
from shoal.train import adamw, adamw_kernel
from shoal.train.adamw import AdamW
from shoal.train.adamw_kernel import NOISE
from shoal.train.optimizer import build, clip_and_update
from shoal.train.rounding import MEAN, SQUARE, WEIGHT, Noise, Place, StochasticRounding, round_
from shoal.train.run_directory import RunDirectory, identity

CPU = torch.device("cpu")
BF16: dict[str, Any] = {"precision": "bf16", "states": "bf16", "seq": 8}
LAYOUTS = [
    "dp=2",
    "fsdp=3",
    "fsdp=2,zero=1",
    "fsdp=4,zero=2",
    "tp=2",
    "fsdp=2,tp=2",
    "pp=2",
    "fsdp=2,zero=1,tp=2,pp=2",
]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *((one, DENSE) for one in LAYOUTS),
        *((one, EXPERTS) for one in ("ep=2,dp=2", "fsdp=4,ep=2,tp=2", "fsdp=8,ep=2")),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_an_element_has_the_same_chance_in_every_layout(layout: str, model: Model) -> None:
    parsed = Layout.parse(layout)
    sharing = Sharing(model, parsed, 8, 2, 1 << 12)
    seen: dict[str, Tensor] = {
        one.name: torch.zeros(math.prod(one.shape), dtype=torch.bool) for one in llama_parameters(model)
    }
    for rank in range(parsed.world):
        for one in updated_ranges(sharing, rank):
            noise = Noise(17, Place.of(one.box), one.start)
            index = torch.arange(math.prod(one.box.whole)).view(one.box.whole)[one.box.slices].reshape(-1)
            mine = index[one.start : one.stop]
            assert torch.equal(noise.drawn(len(mine), CPU), bits(17, mine)), one.name
            seen[one.name][mine] = True
    assert all(bool(found.all()) for found in seen.values())  # every element has an owner


def test_a_value_becomes_one_of_its_neighbours_and_on_average_itself() -> None:
    noise = Noise(3, Place.of(Box((1 << 16,), (0,), (1 << 16,))), 0)
    drawn = noise.drawn(1 << 16, CPU)
    for value in (1 + 2**-10, -(1 + 2**-10), 3e-30, -0.1, 0.0, 1.0, math.inf, -math.inf):
        wide = torch.full((1 << 16,), value)
        for whose in (WEIGHT, MEAN, SQUARE):
            found = round_(wide.clone(), drawn, whose)
            assert torch.equal(found, found.bfloat16().float())
            if value == wide[0].bfloat16().float():
                assert torch.equal(found, wide)
                continue
            low, high = sorted(set(found.tolist()))
            assert low < float(wide[0]) < high
            assert (found.double().mean() - float(wide[0])) / (high - low) == pytest.approx(0, abs=0.01)
    alike = [round_(torch.full((1 << 16,), 1.0 + 2**-8), drawn, whose) for whose in (WEIGHT, MEAN, SQUARE)]
    # Each has bits of its own: weights and moments are not rounded up together.
    assert 0.45 < float((alike[0] == alike[1]).float().mean()) < 0.55
    assert 0.45 < float((alike[1] == alike[2]).float().mean()) < 0.55


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "muon"])
def test_an_update_is_that_of_fp32_rounded_to_a_neighbour(optimizer: Any) -> None:
    """The first update from the same weights: later ones begin from weights that have been rounded. Adafactor's least
    values, and so its updates, depend on the precision of its states."""
    options: dict[str, Any] = {"optimizer": optimizer, "lr": 0.01, "clip": 0.0}
    exact = a_step(DENSE, Recipe(**{**BF16, "precision": "fp32", "states": "fp32"}, **options))
    rounded = a_step(DENSE, Recipe(**{**BF16, "precision": "fp32"}, **options))
    for wide, narrow in zip(exact.pieces, rounded.pieces, strict=True):
        assert narrow.tensor.dtype == torch.bfloat16
        gradient = torch.linspace(-1, 1, narrow.tensor.numel()).view_as(narrow.tensor).bfloat16()
        wide.tensor.data.copy_(narrow.tensor.detach())
        wide.tensor.grad, narrow.tensor.grad = gradient.float(), gradient
    for step in (exact, rounded):
        clip_and_update(step.optimizer, step.pieces, torch.tensor(1.0), 0.0, math.inf, 1)
    for wide, narrow in zip(exact.pieces, rounded.pieces, strict=True):
        found, wanted = narrow.tensor.detach().float(), wide.tensor.detach()
        spacing = 2.0 ** (torch.floor(torch.log2(wanted.abs().clamp(min=1e-30))) - 7)
        assert bool(((found - wanted).abs() <= 1.001 * spacing).all()), narrow.name


def test_updates_smaller_than_a_spacing_are_not_lost() -> None:
    for rounding, moved in (("stochastic", True), ("nearest", False)):
        recipe = Recipe(**BF16, rounding=rounding, lr=1e-5, weight_decay=0.0)
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        piece = a_step(DENSE, Recipe(**BF16)).pieces[0]
        piece.tensor, piece.start = weight, 0
        optimizer = build([piece], recipe)
        for number in range(1, 101):
            weight.grad = torch.ones_like(weight)
            clip_and_update(optimizer, [piece], torch.tensor(1.0), 0.0, math.inf, number)
        if moved:
            # A hundred updates of AdamW with the same gradient: each is the learning rate.
            assert 1 - float(weight.detach().float().mean()) == pytest.approx(1e-3, rel=0.1)
        else:
            assert bool((weight == 1).all())


def test_a_second_moment_fades() -> None:
    """With a decay of 0.9999 it loses less than a spacing in each update: to nearest it would stay for ever."""
    for rounding, expected in (("stochastic", math.exp(-0.02)), ("nearest", 1.0)):
        recipe = Recipe(**BF16, rounding=rounding, beta2=0.9999)
        piece = a_step(DENSE, Recipe(**BF16)).pieces[0]
        piece.tensor, piece.start = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)), 0
        optimizer: Any = build([piece], recipe)
        optimizer.start()
        optimizer.state[piece.tensor]["exp_avg_sq"].fill_(1.0)
        for number in range(1, 201):
            piece.tensor.grad = torch.zeros_like(piece.tensor)
            clip_and_update(optimizer, [piece], torch.tensor(1.0), 0.0, math.inf, number)
        mean = float(optimizer.state[piece.tensor]["exp_avg_sq"].float().mean())
        assert mean == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "muon", "adafactor"])
def test_a_refused_update_changes_nothing(optimizer: Any) -> None:
    recipe = Recipe(**BF16, optimizer=optimizer)
    step = a_step(DENSE, recipe)
    train(step, recipe, DENSE)
    before = [piece.tensor.detach().clone() for piece in step.pieces]
    kept = {
        (piece.name, kind): state.clone()
        for piece in step.pieces
        for kind, state in step.optimizer.state[piece.tensor].items()
    }
    clip_and_update(step.optimizer, step.pieces, torch.tensor(math.nan), 1.0, math.inf, 9)
    for piece, old in zip(step.pieces, before, strict=True):
        assert torch.equal(piece.tensor, old)
        for kind, state in step.optimizer.state[piece.tensor].items():
            assert torch.equal(state, kept[piece.name, kind])


@pytest.mark.parametrize("layout", ["offload=optimizer", "offload=optimizer:0.5"])
def test_the_host_draws_the_same_chances(layout: str) -> None:
    """Without clipping: the norm of gradients that have left is added up in another order."""
    losses, weights = trained(made("dp=1", **BF16 | {"seq": 16}, clip=0.0), late=False)
    found = trained(made(layout, **BF16 | {"seq": 16}, clip=0.0), late=False)
    assert found[0] == losses
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[1], weights, strict=True))


def test_the_kernel_is_told_whose_chances_are_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the kernel that rounds with the numbers it is given does what torch's operators do."""

    def kernel(states: Any, measured: Any, settings: Any, noise: Any) -> None:
        lr, rise1, beta2, _, eps, decay = settings
        group = {"betas": (1 - rise1, beta2), "lr": lr, "eps": eps, "weight_decay": decay / lr}
        for number, (*states_of, _copy) in enumerate(zip(*states, strict=True)):
            numbers = noise[NOISE * number : NOISE * (number + 1)]
            key, start, run, row, run_stride, row_stride, first, contiguous = numbers
            place = Place(run, row, run_stride, row_stride, first, False)
            assert place.contiguous == bool(contiguous) or contiguous
            flat = (one.view(-1) for one in states_of)
            adamw._rounded(*flat, *measured, group, Noise(key, place, start))

    results = []
    for in_kernel in (False, True):
        if in_kernel:
            monkeypatch.setattr(adamw_kernel, "kernel", lambda: kernel)
            monkeypatch.setattr(adamw, "_in_kernel", lambda weight: True)
        pieces = a_step(EXPERTS, Recipe(**BF16)).pieces
        optimizer = build(pieces, Recipe(**BF16))
        assert isinstance(optimizer, AdamW) and isinstance(optimizer.rounding, StochasticRounding)
        assert optimizer.writes_copies == in_kernel
        for number in range(1, 4):
            for piece in pieces:
                piece.tensor.grad = torch.full_like(piece.tensor, 0.01 * number)
            clip_and_update(optimizer, pieces, torch.tensor(1.0), 1.0, math.inf, number)
        results.append([piece.tensor.detach() for piece in pieces])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_a_run_that_began_before_there_was_a_choice_is_rounded_to_nearest(
    settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    chance, nearest = (
        resolve(load(None, settings(recipe__states="bf16", recipe__rounding=one), "dp=1").config)
        for one in ("stochastic", "nearest")
    )
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    then = identity(chance, "data")
    del then["recipe.rounding"]
    content = {"model": chance.model.model_dump(mode="json"), "identity": then}
    run.manifest.write_text(json.dumps(content))
    run.metrics.write_text("{}\n")
    assert run.begun
    run.check_continues(nearest, "data")
    with pytest.raises(BadInput, match=r"recipe.rounding was .*nearest"):
        run.check_continues(chance, "data")
