"""Losses: the preference's formula, its gradient, rows that count for nothing."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shoal.facts.losses import LOSSES
from shoal.facts.recipe import Recipe
from shoal.facts.targets import IGNORE
from shoal.models.loss import Head
from shoal.models.losses import DirectPreference, NextToken, loss_of

HIDDEN, VOCAB, LENGTH = 6, 11, 5


def head_of(seed: int = 0) -> Head:
    head = Head(HIDDEN, VOCAB, None).double()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(seed))
    return head


def rows(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, LENGTH, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCAB, (count, LENGTH), generator=generator)
    targets[:, :2] = IGNORE  # a prompt
    return hidden, targets


def test_every_loss_has_its_facts_and_its_code() -> None:
    for name, facts in LOSSES.items():
        assert loss_of(Recipe(loss=name)).measures == facts.measures
    assert isinstance(loss_of(Recipe()), NextToken)


@pytest.mark.parametrize("factor", [1.0, 0.125])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_pairs_and_its_gradient(smoothing: float, factor: float) -> None:
    head, (hidden, targets) = head_of(), rows(4)
    reference = torch.tensor([-3.0, -4.0, -2.5, -2.0], dtype=torch.float64)
    head.start_step(factor, None)
    found = DirectPreference(0.7, smoothing)(
        head, hidden, SimpleNamespace(targets=targets, reference=reference)
    )
    found[0].backward()
    assert head.weight.grad is not None and hidden.grad is not None
    ours = [head.weight.grad.clone(), hidden.grad.clone()]
    head.weight.grad = hidden.grad = None

    likely = (hidden @ head.weight.T).softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    gained = torch.where(targets != IGNORE, likely.log(), 0).sum(-1) - reference
    margins = 0.7 * torch.stack([gained[0] - gained[1], gained[2] - gained[3]])
    right, wrong = 1 / (1 + torch.exp(-margins)), 1 / (1 + torch.exp(margins))
    loss = (-(1 - smoothing) * right.log() - smoothing * wrong.log()).sum()
    (factor * loss).backward()
    loss, margins = loss.detach(), margins.detach()
    assert found.tolist() == pytest.approx([float(loss), float(margins.sum()), float((margins > 0).sum())])
    for mine, theirs in zip(ours, (head.weight.grad, hidden.grad), strict=True):
        assert (mine - theirs).abs().max() < 1e-12


def test_rows_that_fill_up_a_batch_count_for_nothing() -> None:
    head, (hidden, targets) = head_of(), rows(4)
    loss = DirectPreference(0.7)
    reference = torch.tensor([-3.0, -4.0], dtype=torch.float64)
    with torch.no_grad():
        pair = loss(head, hidden[:2], SimpleNamespace(targets=targets[:2], reference=reference))
        targets[2:] = IGNORE
        filled = torch.cat([reference, torch.full_like(reference, torch.nan)])
        more = loss(head, hidden, SimpleNamespace(targets=targets, reference=filled))
    assert torch.equal(pair, more)


def test_without_a_reference_it_is_what_a_reference_is_made_of() -> None:
    head, (hidden, targets) = head_of(), rows(2)
    wanted = SimpleNamespace(targets=targets, reference=None)
    with torch.no_grad():
        found = DirectPreference(0.1)(head, hidden, wanted)
        assert torch.equal(found, head.log_probabilities(hidden, targets).sum(-1))
        # Compared with itself, nothing is better than anything: a coin's loss.
        wanted = SimpleNamespace(targets=targets, reference=found)
        assert float(DirectPreference(0.1)(head, hidden, wanted)[0]) == pytest.approx(0.6931471805599453)
    with pytest.raises(ValueError, match="there is none"):
        DirectPreference(0.1)(head, hidden, SimpleNamespace(targets=targets, reference=None))
