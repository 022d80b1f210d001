"""Cross-entropy of a linear head that never holds all logits, with its gradients made in the forward pass.

The logits of a chunk of tokens are made, turned into their own gradients in place, multiplied into the gradients of the
hidden states and of the head's weight, and forgotten. So nothing is computed twice, and what waits for the backward
pass is as large as the hidden states and the weight, not as the logits.

The functions on one chunk are plain torch, elementwise and sums along rows: on a GPU they are compiled, and read and
write the logits once each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.facts.logits import tokens_at_once
from shoal.facts.targets import IGNORE


class Vocabulary(Protocol):
    """The rows of the head that are here, and how ranks that hold other rows agree on what a token needs of all."""

    first: int
    most_rows: int  # of any rank

    def largest(self, values: Tensor) -> None:
        """The largest of all ranks', in place."""

    def total(self, values: Tensor) -> None:
        """The sum of all ranks', in place."""


class WholeVocabulary:
    """All rows are here."""

    first = 0

    def __init__(self, rows: int) -> None:
        self.most_rows = rows

    def largest(self, values: Tensor) -> None: ...

    def total(self, values: Tensor) -> None: ...


class PendingWeightGradient:
    """Adds up a head's weight gradient over micro-batches whose backward pass is still to come.

    Schedules that run several forward passes before the first backward pass would otherwise keep one for each.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.sum: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        self.passes += 1
        self.sum = gradient if self.sum is None else self.sum.add_(gradient)

    def take(self) -> Tensor | None:
        """The sum, with the last of the passes that it is made of."""
        self.passes -= 1
        if self.passes:
            return None
        taken, self.sum = self.sum, None
        return taken


def linear_cross_entropy(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary,
    pending: PendingWeightGradient | None = None,
) -> Tensor:
    """Σ (ln Σ exp(x·Wᵀ) − target's logit) over the tokens whose target counts: rows [N, hidden], weight [V, hidden].

    ``pending`` adds the weight's gradient up over several calls, whose losses have to be scaled alike.
    """
    if torch.is_grad_enabled():
        loss: Tensor = LinearCrossEntropy.apply(
            rows, weight, targets, vocabulary, pending or PendingWeightGradient()
        )
        return loss
    matrix = weight.to(rows.dtype)
    losses = [
        summed(*normalisers(part @ matrix.T, wanted, vocabulary), wanted)
        for part, wanted in in_chunks(vocabulary, rows, targets)
    ]
    return torch.stack(losses).sum()


def in_chunks(vocabulary: Vocabulary, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """By the largest part and not by this rank's: ranks meet in every chunk, so all must have equally many."""
    at_once = tokens_at_once(vocabulary.most_rows)
    return zip(*(tensor.split(at_once) for tensor in tensors), strict=True)


class LinearCrossEntropy(torch.autograd.Function):
    """Makes the gradients of a loss whose factor is not yet known; the backward pass only multiplies by it."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocabulary: Vocabulary,
        pending: PendingWeightGradient,
    ) -> Tensor:
        matrix = weight.to(rows.dtype)
        wide = torch.promote_types(rows.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=rows.device)
        of_rows, of_weight = torch.empty_like(rows), None
        for part, wanted, back in in_chunks(vocabulary, rows, targets, of_rows):
            logits = part @ matrix.T
            normaliser, target = normalisers(logits, wanted, vocabulary)
            loss += summed(normaliser, target, wanted)
            to_gradients(logits, wanted, normaliser, vocabulary.first)
            torch.mm(logits, matrix, out=back)
            product = logits.T @ part
            of_weight = product.to(weight.dtype) if of_weight is None else of_weight.add_(product)
        assert of_weight is not None
        pending.add(of_weight)
        ctx.save_for_backward(of_rows)
        ctx.pending = pending
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Every micro-batch of a step has the same factor, so the sum of their gradients may be scaled with the last.
        (of_rows,) = ctx.saved_tensors
        of_weight = ctx.pending.take()
        of_weight = None if of_weight is None else of_weight.mul_(gradient)
        return of_rows * gradient.to(of_rows.dtype), of_weight, None, None, None


def normalisers(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """For each token ln Σ exp(logit) over all ranks' rows, and the logit of its target."""
    peak = row_peaks(logits)
    vocabulary.largest(peak)
    both = row_sums(logits, targets, peak, vocabulary.first)
    vocabulary.total(both)
    return both[0].log() + peak, both[1]


def row_peaks(logits: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    if not logits.shape[1]:
        return torch.full(logits.shape[:1], -torch.inf, dtype=wide, device=logits.device)
    return logits.amax(-1).to(wide)


def row_sums(logits: Tensor, targets: Tensor, peak: Tensor, first: int) -> Tensor:
    """[2, tokens]: Σ exp(logit − peak), and the target's logit where its row is here."""
    added = (logits.to(peak.dtype) - peak[:, None]).exp().sum(-1)
    if not logits.shape[1]:
        return torch.stack([added, torch.zeros_like(added)])
    place, here = rows_here(targets, first, logits.shape[1])
    found = logits.gather(1, place[:, None])[:, 0].to(peak.dtype)
    return torch.stack([added, torch.where(here, found, 0)])


def summed(normaliser: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
    return torch.where(wanted != IGNORE, normaliser - target, 0).sum()


def to_gradients(logits: Tensor, targets: Tensor, normaliser: Tensor, first: int) -> None:
    """In place: softmax minus one-hot, and zero where the target does not count."""
    if not logits.shape[1]:
        return
    place, here = rows_here(targets, first, logits.shape[1])
    softmax = (logits.to(normaliser.dtype) - normaliser[:, None]).exp()
    softmax.scatter_add_(1, place[:, None], -here[:, None].to(softmax.dtype))
    logits.copy_(softmax.mul_((targets != IGNORE)[:, None]))


def rows_here(index: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which row of ours a token is, any where it is none, and whether it is one. IGNORE is in no rank's rows."""
    place = index - first
    here = (place >= 0) & (place < rows)
    return place.clamp(0, max(0, rows - 1)), here
