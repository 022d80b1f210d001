"""Losses: what a run minimises, made of the hidden states at the end of the network.

One interface (``Loss``), which docs/losses.md explains: a loss is called with the head, the hidden states of a
micro-batch and what is wanted of it, and returns sums, so that only adding is left to do over micro-batches and ranks.
What others need to know of a loss, without torch, is in ``facts/losses.py`` under the same name.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.facts.losses import LOSSES
from shoal.facts.recipe import Recipe
from shoal.models.loss import Head


class LossInput(Protocol):
    """Of a micro-batch, what a loss reads."""

    @property
    def targets(self) -> Tensor | None:
        """int64 [rows, tokens], IGNORE where there is nothing to predict; tokens that are here, on a context rank."""

    @property
    def reference(self) -> Tensor | None:
        """float64 [rows]: each row's log-probability under the first weights; NaN where a row counts for nothing."""


class SharedRows(Protocol):
    """How ranks that have some tokens of every row agree on what a row needs of all."""

    def total(self, parts: Tensor) -> Tensor:
        """The sum of all ranks' values; a gradient goes to this rank's own."""

    def once(self, sums: Tensor) -> Tensor:
        """What all of them computed alike, with a value on one of them; all have its gradient."""


class WholeRows:
    """All tokens are here."""

    def total(self, parts: Tensor) -> Tensor:
        return parts

    def once(self, sums: Tensor) -> Tensor:
        return sums


class Loss(Protocol):
    """What is minimised. ``rows`` is set from outside where ranks share rows."""

    measures: tuple[str, ...]  # names of what it reports beside itself
    rows: SharedRows

    def __call__(self, head: Head, hidden: Tensor, wanted: LossInput) -> Tensor:
        """[1 + measures]: the summed loss of a micro-batch, then the sums that are reported beside it.

        The gradient of the first is that of ``head.factor`` times it; the others have none. In validation, under
        ``no_grad``, it is called too.
        """


class NextToken:
    """Cross-entropy of the tokens that follow; all that counts is the head's."""

    measures = LOSSES["next_token"].measures

    def __init__(self) -> None:
        self.rows: SharedRows = WholeRows()  # a sum over targets, each of which is one rank's

    def __call__(self, head: Head, hidden: Tensor, wanted: LossInput) -> Tensor:
        assert wanted.targets is not None
        loss: Tensor
        loss, _ = head(hidden, wanted.targets)
        return torch.stack([loss])  # and no view of it, which FSDP warns of


class DirectPreference:
    """DPO (Rafailov et al., 2023): of two answers to a prompt, one is to become more likely relative to the other.

    For rows 2i (chosen) and 2i + 1 (rejected), with log π the log-probability of a row's answer, log π₀ that under the
    first weights, and ε the label smoothing:

        margin = β · ((log π − log π₀)(chosen) − (log π − log π₀)(rejected))
        loss = −(1 − ε) · ln σ(margin) − ε · ln σ(−margin)

    Reported are the margin, the difference of the two's implicit rewards, and how often it is above 0.
    """

    measures = LOSSES["dpo"].measures

    def __init__(self, beta: float, label_smoothing: float = 0.0) -> None:
        self.beta, self.smoothing = beta, label_smoothing
        self.rows: SharedRows = WholeRows()

    def __call__(self, head: Head, hidden: Tensor, wanted: LossInput) -> Tensor:
        """Without a reference, the log-probability of each row: that is what a reference is made of."""
        assert wanted.targets is not None
        # In double precision: what counts is a small difference of sums over all tokens of an answer.
        tokens = head.log_probabilities(hidden, wanted.targets)
        found = self.rows.total(tokens.sum(-1, dtype=torch.float64))
        if wanted.reference is None:
            if torch.is_grad_enabled():
                raise ValueError("a preference is trained against a reference, and there is none")
            return found
        counts = ~wanted.reference.isnan()
        gained = torch.where(counts, found - wanted.reference.nan_to_num(), 0)
        margin = self.beta * (gained[0::2] - gained[1::2])
        agree, disagree = F.logsigmoid(margin), F.logsigmoid(-margin)
        losses = torch.where(counts[0::2], -(1 - self.smoothing) * agree - self.smoothing * disagree, 0)
        loss = _WithFactor.apply(losses.sum(), head.factor)
        seen = margin.detach()
        return self.rows.once(torch.stack([loss, seen.sum(), (seen > 0).sum().to(seen.dtype)]))


def loss_of(recipe: Recipe) -> Loss:
    """The loss that a recipe names."""
    if recipe.loss == "dpo":
        return DirectPreference(recipe.beta, recipe.label_smoothing)
    return NextToken()


class _WithFactor(torch.autograd.Function):
    """A value as it is, with a gradient that is so many times as large."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
