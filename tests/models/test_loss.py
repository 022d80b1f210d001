from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from shoal.facts import logits
from shoal.facts.targets import IGNORE
from shoal.models import logits as logits_on_cpu
from shoal.models.cross_entropy import PendingWeightGradient
from shoal.models.linear import Embedding
from shoal.models.loss import Head
from shoal.observe.memory import MemoryTracker


def head(dtype: torch.dtype = torch.float64) -> Head:
    made = Head(16, 50, None).to(dtype)
    torch.nn.init.normal_(made.weight)
    return made


def batch(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(3, 11, 16, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 50, (3, 11))
    targets[0, 4:] = IGNORE
    return hidden, targets


def test_sum_and_count_leave_out_what_is_ignored() -> None:
    made = head()
    hidden, targets = batch()
    total, count = made(hidden, targets)
    kept = targets != IGNORE
    expected = F.cross_entropy(hidden[kept] @ made.weight.T, targets[kept], reduction="sum")
    assert count.dtype == torch.int64 and int(count) == 26
    assert torch.allclose(total, expected, rtol=1e-14)
    nothing, none = made(hidden, torch.full_like(targets, IGNORE))
    assert float(nothing.detach()) == 0 and int(none) == 0


def test_chunks_give_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made = head()
    hidden, targets = batch()
    whole, _ = made(hidden, targets)
    expected = torch.autograd.grad(whole, [hidden, made.weight])
    for logits_at_once in (1, 50 * 7, 50 * 32):
        monkeypatch.setattr(logits, "LOGITS_AT_ONCE", logits_at_once)
        total, count = made(hidden, targets)
        assert int(count) == 26
        assert torch.allclose(total, whole, rtol=1e-14)
        for gradient, wanted in zip(torch.autograd.grad(total, [hidden, made.weight]), expected, strict=True):
            assert torch.allclose(gradient, wanted, rtol=1e-12, atol=1e-14)


def test_half_precision_states_give_a_single_precision_loss() -> None:
    made = head(torch.float32)
    hidden, targets = batch(torch.bfloat16)
    total, _ = made(hidden, targets)
    total.backward()
    assert total.dtype == made.logits(hidden).dtype == torch.float32
    assert made.weight.grad is not None and made.weight.grad.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_a_tied_head_borrows_whatever_the_embedding_holds() -> None:
    embedding = Embedding(50, 16, torch.float32)
    tied = Head(16, 50, embedding)
    assert tied.matrix() is embedding.weight
    assert not list(tied.parameters()) and not tied.state_dict()
    embedding.weight = torch.nn.Parameter(torch.ones(50, 16))
    assert tied.matrix() is embedding.weight
    both = torch.nn.ModuleList([embedding, tied])
    copied = copy.deepcopy(both)
    assert copied[1].matrix() is copied[0].weight
    assert copied[1].matrix() is not embedding.weight


def gradients_of(total: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(total, of))


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("logits_at_once", [50 * 4, 50 * 64])
def test_the_loss_is_torchs_own_with_any_factor_and_z(
    monkeypatch: pytest.MonkeyPatch, logits_at_once: int, cap: float | None
) -> None:
    monkeypatch.setattr(logits, "LOGITS_AT_ONCE", logits_at_once)
    monkeypatch.setattr(logits_on_cpu, "IN_CACHE", 50 * 3)
    made, (hidden, targets) = head(), batch()
    made.z_loss, made.cap = 0.3, cap
    scores = hidden.flatten(0, 1) @ made.weight.T
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    assert torch.allclose(made.logits(hidden).flatten(0, 1), scores, rtol=1e-14)
    plain = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    drift = scores.logsumexp(-1)[targets.flatten() != IGNORE].square().sum()
    expected = plain + 0.3 * drift
    wanted = gradients_of(expected / 26, hidden, made.weight)
    # The factor is known beforehand; or it comes with the backward pass.
    for factor, later in ((1 / 26, 1.0), (1.0, 1 / 26)):
        made.start_step(factor, None)
        total, _ = made(hidden, targets)
        assert torch.allclose(total, expected, rtol=1e-13)
        for found, right in zip(gradients_of(total * later, hidden, made.weight), wanted, strict=True):
            assert torch.allclose(found, right, rtol=1e-11, atol=1e-14)
    with torch.no_grad():
        assert torch.allclose(made(hidden, targets)[0], plain, rtol=1e-13), "a validation loss knows no z"


def test_several_forward_passes_before_the_first_backward_pass_keep_one_weight_gradient() -> None:
    made, batches = head(), [batch() for _ in range(3)]
    expected = torch.zeros_like(made.weight)
    for hidden, targets in batches:
        scores = hidden.flatten(0, 1) @ made.weight.T
        loss = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE, reduction="sum")
        expected += torch.autograd.grad(loss * 0.5, made.weight)[0]
    pending = PendingWeightGradient()
    made.start_step(0.5, pending)
    losses = [made(hidden, targets)[0] for hidden, targets in batches]
    assert pending.sum is not None and pending.sum.shape == made.weight.shape
    for loss in losses[:2]:
        loss.backward()
        assert made.weight.grad is None
    losses[2].backward()
    assert pending.sum is None and torch.allclose(made.weight.grad, expected, rtol=1e-12)


def test_a_half_precision_weight_gets_its_gradient_in_the_precision_that_it_adds_up_in() -> None:
    made = head(torch.bfloat16)
    made.weight.grad_dtype = torch.float32
    hidden, targets = batch(torch.bfloat16)
    made.start_step(1.0, PendingWeightGradient())
    made(hidden, targets)[0].backward()
    assert made.weight.grad is not None and made.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("logits_at_once", [50 * 4, 50 * 64])
def test_log_probabilities_take_any_gradient(
    monkeypatch: pytest.MonkeyPatch, logits_at_once: int, cap: float | None
) -> None:
    monkeypatch.setattr(logits, "LOGITS_AT_ONCE", logits_at_once)
    made, (hidden, targets) = head(), batch()
    made.cap = cap
    upstream = torch.randn(targets.shape, dtype=torch.float64)
    every = torch.log_softmax(made.logits(hidden), -1)
    expected = every.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != IGNORE)
    found = made.log_probabilities(hidden, targets)
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-14)
    wanted = gradients_of((expected * upstream).sum(), hidden, made.weight)
    for ours, right in zip(gradients_of((found * upstream).sum(), hidden, made.weight), wanted, strict=True):
        assert torch.allclose(ours, right, rtol=1e-11, atol=1e-14)


def test_in_single_precision_the_loss_is_the_plain_one_within_rounding() -> None:
    made, (hidden, targets) = head(torch.float32), batch(torch.float32)
    plain = F.cross_entropy(
        hidden.flatten(0, 1) @ made.weight.T, targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    total, _ = made(hidden, targets)
    assert float((total - plain).detach().abs() / plain.detach()) < 1e-6
    wanted = gradients_of(plain, hidden, made.weight)
    for found, right in zip(gradients_of(total, hidden, made.weight), wanted, strict=True):
        assert float((found - right).abs().max() / right.abs().max()) < 1e-6


def test_no_operator_leaves_more_than_its_result_behind() -> None:
    """What a dry run sees of the loss: logits in the compute precision, a few numbers for each token, gradients."""
    made, (hidden, targets) = head(torch.float32), batch(torch.float32)
    with MemoryTracker() as tracker:
        tracker.mark([made.weight, hidden, targets], "given")
        made(hidden, targets)
    tokens = targets.numel()
    # The logits beside the hidden states' gradient and the weight's; and what each token has.
    most = 4 * (tokens * 50 + tokens * 16 + 50 * 16) + 60 * tokens
    assert tracker.peak - sum(one.nbytes for one in (made.weight, hidden, targets)) < most


def test_where_nothing_can_be_compiled_the_loss_goes_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def compiled(function: object) -> Callable[..., None]:
        def broken(*arguments: object) -> None:
            calls.append(arguments)
            raise RuntimeError("no C compiler\nand more")

        return broken

    monkeypatch.setattr(logits_on_cpu, "_compiled", compiled)
    monkeypatch.setattr(logits_on_cpu, "_NOT_COMPILED", set())
    assert not logits_on_cpu._ran_compiled(logits_on_cpu._statistics, 1)
    assert not logits_on_cpu._ran_compiled(logits_on_cpu._statistics, 2)
    assert calls == [(1,)]
    said = capsys.readouterr().out
    assert said == "the loss runs without kernels of its own, which is slower: no C compiler\n"
