"""Groups of parameters that are frozen: no gradient, no states; the others are trained as by a plain loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.train.conftest import network_of
from torch.nn import functional as F

from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.facts.support import missing
from shoal.train.loop import Training
from shoal.train.optimizer import learning_rate

MakeTraining = Callable[..., Training]


def frozen(*patterns: str) -> str:
    groups = ", ".join(f'{{match = "{one}", frozen = true}}' for one in patterns)
    return f"[{groups}]"


@pytest.mark.parametrize(
    "patterns",
    [("*.self_attn.*",), ("model.embed_tokens.weight", "*.layers.0.*"), ("*norm*", "*.mlp.down_proj.*")],
)
def test_steps_equal_a_plain_loop(training: MakeTraining, patterns: tuple[str, ...]) -> None:
    """Plain autograd and torch's AdamW over the other parameters, three steps in fp64, clipping among them."""
    groups = frozen(*patterns)
    options = {"recipe__precision": "fp64", "data__packing": False, "recipe__clip": 0.5}
    ours = training("ours", "dp=1,micro=4", recipe__groups=groups, **options)
    reference = network_of(training("reference", **options))
    recipe = ours.job.config.recipe
    still = {name for name, _ in reference.named_parameters() if recipe.frozen(name)}
    assert still
    moving = {name: one for name, one in reference.named_parameters() if name not in still}
    before = {name: one.detach().clone() for name, one in network_of(ours).named_parameters()}
    optimizer = torch.optim.AdamW(
        [{"params": [one], "weight_decay": 0.1 if one.ndim >= 2 else 0.0} for one in moving.values()],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in (1, 2, 3):
        batch = ours.loader.rows(step, range(8))
        logits = reference.lm_head.logits(reference(batch.tokens, batch.positions))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
        gradients = torch.autograd.grad(loss, list(moving.values()))
        for one, gradient in zip(moving.values(), gradients, strict=True):
            one.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(list(moving.values()), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        optimizer.step()
        micro = [ours.loader.rows(step, positions) for positions in ours.program.positions(step)]
        result = ours.step(step, micro, sum(one.count for one in micro))
        assert result.loss == pytest.approx(loss.item(), rel=1e-12)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-10)
    for name, parameter in network_of(ours).named_parameters():
        if name in still:
            assert torch.equal(parameter, before[name]), name
            assert parameter.grad is None and not parameter.requires_grad
        else:
            assert torch.allclose(parameter, moving[name], rtol=1e-9, atol=1e-12), name
            assert not torch.equal(parameter, before[name]), name
    assert {piece.name for piece in ours.step.pieces} == moving.keys()
    assert len(ours.step.optimizer.state) == len(moving)


def test_the_first_group_that_matches_decides() -> None:
    groups = [{"match": "*q_proj*", "lr": 1e-4}, {"match": "*self_attn*", "frozen": True}]
    recipe = Recipe.model_validate({"groups": groups})
    assert recipe.freezes and recipe.frozen("model.layers.0.self_attn.k_proj.weight")
    assert not recipe.frozen("model.layers.0.self_attn.q_proj.weight")
    assert not recipe.frozen("model.norm.weight")


@pytest.mark.parametrize(
    ("recipe", "match", "layout", "what"),
    [
        ({}, "*", "dp=1", "of all parameters"),
        ({}, "*.layers.[0-3].*", "pp=4", "of all parameters of stage 1 of pp"),
        ({"optimizer": "muon"}, "*norm*", "dp=1", "with recipe.optimizer"),
        ({"ema": 0.9}, "*norm*", "dp=1", "with recipe.ema"),
        ({}, "*norm*", "offload=optimizer", "with layout: offload=optimizer"),
    ],
)
def test_what_frozen_groups_do_not_go_with_is_named(
    recipe: dict[str, object], match: str, layout: str, what: str
) -> None:
    config = Config.model_validate({"recipe": {**recipe, "groups": [{"match": match, "frozen": True}]}})
    (problem,) = missing(config, PRESETS["tiny"], Layout.parse(layout))
    assert what in problem.what and problem.fix
