"""Training losses, computed from the hidden states at the end of the network.

All share one interface (``Loss``), which docs/losses.md explains: a loss takes the head, a micro-batch's hidden states
and its inputs, and returns sums, so that micro-batches and ranks only need to be added. ``facts/losses.py`` has each
loss's properties that others need without torch, under the same name.
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
    """What a loss reads of a micro-batch."""

    @property
    def targets(self) -> Tensor | None:
        """int64 [rows, tokens], IGNORE where there is nothing to predict; on a context rank, its own tokens."""

    @property
    def reference(self) -> Tensor | None:
        """float64 [rows]: each row's log-probability under the initial weights; NaN if the row does not count."""


class SharedRows(Protocol):
    """Reductions for ranks that hold some tokens of every row."""

    def total(self, parts: Tensor) -> Tensor:
        """The sum over all ranks; this rank's own part gets the gradient."""

    def once(self, sums: Tensor) -> Tensor:
        """Values that all ranks computed alike, kept on one of them; all get the gradient."""


class WholeRows:
    """Every row has all its tokens on this rank."""

    def total(self, parts: Tensor) -> Tensor:
        return parts

    def once(self, sums: Tensor) -> Tensor:
        return sums


class Loss(Protocol):
    """The objective. ``rows`` is set from outside if ranks share rows."""

    measures: tuple[str, ...]  # names of additional reported values
    rows: SharedRows

    def __call__(self, head: Head, hidden: Tensor, wanted: LossInput) -> Tensor:
        """[1 + measures]: the summed loss of a micro-batch, then the sums reported with it.

        The first has the gradient of ``head.factor`` times itself; the others have none. Validation calls it too,
        under ``no_grad``.
        """


class NextToken:
    """Cross-entropy of the next token, counting the head's targets."""

    measures = LOSSES["next_token"].measures

    def __init__(self) -> None:
        self.rows: SharedRows = WholeRows()  # a sum over targets, each on one rank

    def __call__(self, head: Head, hidden: Tensor, wanted: LossInput) -> Tensor:
        assert wanted.targets is not None
        loss: Tensor
        loss, _ = head(hidden, wanted.targets)
        return torch.stack([loss])  # not a view of it, which FSDP warns about


class DirectPreference:
    """DPO (Rafailov et al., 2023): make one of two answers to a prompt more likely relative to the other.

    For rows 2i (chosen) and 2i + 1 (rejected), with log π the log-probability of a row's answer, log π₀ that under the
    initial weights, and ε the label smoothing:

        margin = β · ((log π − log π₀)(chosen) − (log π − log π₀)(rejected))
        loss = −(1 − ε) · ln σ(margin) − ε · ln σ(−margin)

    It reports the margin, the difference of the two implicit rewards, and how often it is above 0.
    """

    measures = LOSSES["dpo"].measures

    def __init__(self, beta: float, label_smoothing: float = 0.0) -> None:
        self.beta, self.smoothing = beta, label_smoothing
        self.rows: SharedRows = WholeRows()

    def __call__(self, head: Head, hidden: Tensor, wanted: LossInput) -> Tensor:
        """Without a reference, the log-probability of each row, from which a reference is made."""
        assert wanted.targets is not None
        # In fp64: the loss depends on a small difference of sums over all tokens of an answer.
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
    """A value unchanged, with its gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
