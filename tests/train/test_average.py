"""The exponential average of the weights: what it is, when it stands still, and who evaluates with it."""

from __future__ import annotations

import math

import torch
from tests.train.test_other_optimizers import DENSE, LR, a_step, train

from shoal.facts.recipe import Recipe
from shoal.train.optimizer import clip_and_update

DECAY = 0.7


def test_it_follows_the_weights_and_no_refused_update() -> None:
    recipe = Recipe(precision="fp64", lr=LR, seq=8, ema=DECAY)
    step = a_step(DENSE, recipe)
    assert step.average is not None
    wanted = [piece.tensor.detach().clone() for piece in step.pieces]
    for _ in range(3):
        train(step, recipe, DENSE)
        step.average.follow(torch.tensor(False))
        wanted = [
            DECAY * old + (1 - DECAY) * piece.tensor.detach()
            for old, piece in zip(wanted, step.pieces, strict=True)
        ]
    step.average.follow(torch.tensor(True))
    for piece, average in zip(step.pieces, wanted, strict=True):
        assert torch.allclose(step.optimizer.state[piece.tensor]["ema"], average, rtol=1e-13, atol=0)
    before = [piece.tensor.detach().clone() for piece in step.pieces]
    with step.average.in_use(step.placed):
        assert all(
            torch.equal(piece.tensor, step.optimizer.state[piece.tensor]["ema"]) for piece in step.pieces
        )
    assert all(torch.equal(piece.tensor, old) for piece, old in zip(step.pieces, before, strict=True))
    assert not torch.equal(before[0], wanted[0])


def test_it_is_wide_where_weights_are_not() -> None:
    step = a_step(DENSE, Recipe(precision="bf16", states="bf16", lr=LR, seq=8, ema=0.999))
    piece = step.pieces[0]
    assert piece.tensor.dtype == torch.bfloat16
    average = step.optimizer.state[piece.tensor]["ema"]
    before = average.clone()
    piece.tensor.grad = torch.ones_like(piece.tensor)
    clip_and_update(step.optimizer, step.pieces[:1], torch.tensor(1.0), 0.0, math.inf)
    assert step.average is not None
    step.average.follow(torch.tensor(False))
    assert average.dtype == torch.float32 and not torch.equal(average, before)
