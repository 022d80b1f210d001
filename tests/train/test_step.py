"""One step against an independent reference: plain autograd and torch's own optimizer in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests.train.conftest import network_of
from torch.nn import functional as F

from shoal.train.loop import Training
from shoal.train.optimizer import learning_rate

MakeTraining = Callable[..., Training]


@pytest.mark.parametrize(("layout", "z_loss"), [("dp=1", 0), ("dp=1,micro=1", 0.01), ("dp=1,micro=4", 0)])
def test_steps_equal_a_plain_loop(training: MakeTraining, layout: str, z_loss: float) -> None:
    """Gradients, norm, clipping and AdamW, three steps, in fp64; micro-batches have unequal numbers of targets."""
    options = {
        "recipe__precision": "fp64",
        "data__packing": False,
        "recipe__clip": 0.5,
        "recipe__z_loss": z_loss,
    }
    ours = training("ours", layout, **options)
    reference = network_of(training("reference", **options))
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    recipe = ours.job.config.recipe
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=False,
        foreach=False,
    )
    for step in (1, 2, 3):
        batch = ours.loader.rows(step, range(8))
        optimizer.zero_grad()
        logits = reference.lm_head.logits(reference(batch.tokens, batch.positions))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
        loss = loss + z_loss * logits.logsumexp(-1)[batch.targets != -100].square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(reference.parameters()), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        optimizer.step()

        micro = [ours.loader.rows(step, positions) for positions in ours.program.positions(step)]
        result = ours.step(step, micro, sum(batch.count for batch in micro))
        assert result.loss == pytest.approx(loss.item(), rel=1e-12)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-10)
        theirs = dict(reference.named_parameters())
        for name, parameter in network_of(ours).named_parameters():
            assert torch.allclose(parameter.grad, theirs[name].grad, rtol=1e-9, atol=1e-14), name
            assert torch.allclose(parameter, theirs[name], rtol=1e-9, atol=1e-12), name


def test_low_precision_keeps_full_precision_weights(training: MakeTraining) -> None:
    for precision in ("bf16", "fp16"):
        made = training(precision, recipe__precision=precision)
        batch = made.loader.rows(1, range(8))
        assert network_of(made)(batch.tokens, batch.positions).dtype in (torch.bfloat16, torch.float16)
        result = made.step(1, [batch], batch.count)
        assert result.updated
        exact = training(f"{precision}-reference").step(1, [batch], batch.count)
        assert result.loss == pytest.approx(exact.loss, rel=2e-2)
        assert result.grad_norm == pytest.approx(exact.grad_norm, rel=5e-2)
        # All of the batch is one micro-batch: nothing is added to its gradients, so those of bf16 stay narrow.
        kept = torch.bfloat16 if precision == "bf16" else torch.float32
        for piece in made.step.pieces:
            assert piece.tensor.grad is not None
            assert (piece.tensor.dtype, piece.tensor.grad.dtype) == (torch.float32, kept)
        # What the network reads is as narrow as it computes, and follows.
        for piece in made.step.pieces:
            working = piece.held.parameter
            assert working.dtype == network_of(made).model.compute
            assert torch.equal(working, piece.tensor.to(working.dtype))


def test_an_overflow_leaves_weights_alone_and_lowers_the_scale(training: MakeTraining) -> None:
    made = training(recipe__precision="fp16")
    before = {name: parameter.detach().clone() for name, parameter in network_of(made).named_parameters()}
    made.step.scale.value = 2.0**40
    batch = made.loader.rows(1, range(8))
    result = made.step(1, [batch], batch.count)
    assert not result.updated
    assert made.step.scale.value == 2.0**39
    for name, parameter in network_of(made).named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_batch_with_nothing_to_predict_is_no_error(training: MakeTraining) -> None:
    made = training()
    batch = made.loader.rows(1, range(8))
    empty = dataclasses.replace(batch, targets=torch.full_like(batch.targets, -100), count=0)
    result = made.step(1, [empty], 0)
    assert (result.loss, result.grad_norm, result.updated) == (0.0, 0.0, True)
