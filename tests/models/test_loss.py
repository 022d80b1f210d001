from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from shoal.facts import logits
from shoal.facts.targets import IGNORE
from shoal.models.linear import Embedding
from shoal.models.loss import Head


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
