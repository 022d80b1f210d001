"""Cross-entropy of a linear head that never holds all logits.

In two forms. ``summed_cross_entropy``, for training, makes its gradients in the forward pass: the logits of a chunk of
tokens are turned into their own gradients in place, multiplied into the gradients of the hidden states and of the
head's weight, and forgotten. Nothing is computed twice, and what waits for the backward pass is as large as the hidden
states and the weight. ``token_log_probabilities``, for losses that are made of them, takes any upstream gradient, and
so has to compute a chunk's logits again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.facts.logits import tokens_at_once
from shoal.facts.targets import IGNORE
from shoal.models.logits import gradients_in_one_kernel_, logits_to_gradients_, token_statistics
from shoal.models.wide_product import add_product_, wide_product


class Vocabulary(Protocol):
    """The rows of the head that are here, and how ranks that hold other rows agree on what a token needs of all."""

    @property
    def first(self) -> int: ...

    @property
    def most_rows(self) -> int:
        """Of any rank."""

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

    def add(self, gradient: Tensor, dtype: torch.dtype) -> None:
        """``dtype``: the precision that they add up in."""
        self.passes += 1
        self.sum = gradient.to(dtype) if self.sum is None else self.sum.add_(gradient)

    def take(self) -> Tensor | None:
        """The sum, with the last of the passes that it is made of."""
        self.passes -= 1
        if self.passes:
            return None
        taken, self.sum = self.sum, None
        return taken


def summed_cross_entropy(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary,
    factor: float = 1.0,
    z: float = 0.0,
    pending: PendingWeightGradient | None = None,
    cap: float | None = None,
) -> Tensor:
    """Σ (ln Σ exp(x·Wᵀ) − target's logit) over the tokens whose target counts: rows [N, hidden], weight [V, hidden].

    Its gradients are those of factor · Σ: made ahead of the backward pass, they would otherwise be rounded twice.
    ``z`` adds z · ln² Σ exp of every such token, which keeps logits from drifting. ``pending`` adds the weight's
    gradient up over several calls, with whose last backward pass it comes, in the precision that the weight's gradients
    add up in. These passes have to begin here, with a gradient of 1. Without it a gradient is rounded to the weight's
    own precision, and the backward pass may begin anywhere. With a ``cap`` all logits are cap · tanh(x·Wᵀ / cap).
    """
    if torch.is_grad_enabled():
        loss: Tensor = _SummedCrossEntropy.apply(rows, weight, targets, vocabulary, factor, z, pending, cap)
        return loss
    matrix = weight.to(rows.dtype)
    parts = [
        _sum(*_normalisers(part @ matrix.T, wanted, vocabulary, cap), wanted, z)
        for part, wanted in _in_chunks(vocabulary, rows, targets)
    ]
    return torch.stack(parts).sum()


def token_log_probabilities(
    rows: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, cap: float | None = None
) -> Tensor:
    """[N]: ln of the probability of each token's target, 0 where it does not count."""
    found: Tensor = _TokenLogProbabilities.apply(rows, weight, targets, vocabulary, cap)
    return found


def _in_chunks(vocabulary: Vocabulary, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """By the largest part and not by this rank's: ranks meet in every chunk, so all must have equally many."""
    at_once = tokens_at_once(vocabulary.most_rows)
    return zip(*(tensor.split(at_once) for tensor in tensors), strict=True)


class _SummedCrossEntropy(torch.autograd.Function):
    """Makes its gradients in the forward pass; the backward pass hands them on, times the gradient that it is given."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocabulary: Vocabulary,
        factor: float,
        z: float,
        pending: PendingWeightGradient | None,
        cap: float | None,
    ) -> Tensor:
        matrix, of_rows = weight.to(rows.dtype), torch.empty_like(rows)
        of_weight = _WeightGradient(rows.shape[0] > tokens_at_once(vocabulary.most_rows))
        ctx.trained = ctx.needs_input_grad[1]

        def chunk(part: Tensor, wanted: Tensor, back: Tensor) -> Tensor:
            logits = part @ matrix.T
            normaliser, target = _to_gradients_(logits, wanted, vocabulary, factor, z, cap)
            torch.mm(logits, matrix, out=back)
            if ctx.trained:
                of_weight.add(logits, part)
            return _sum(normaliser, target, wanted, z)

        losses = [chunk(*tensors) for tensors in _in_chunks(vocabulary, rows, targets, of_rows)]
        ctx.alone, ctx.pending = pending is None, pending or PendingWeightGradient()
        if ctx.trained:
            ctx.pending.add(of_weight.take(), weight.dtype if pending is None else weight.grad_dtype)
        ctx.save_for_backward(of_rows)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (of_rows,) = ctx.saved_tensors
        of_weight = ctx.pending.take() if ctx.trained else None
        if ctx.alone:
            of_rows = of_rows.mul_(gradient)
            of_weight = None if of_weight is None else of_weight.mul_(gradient)
        return of_rows, of_weight, None, None, None, None, None, None


class _TokenLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocabulary: Vocabulary,
        cap: float | None,
    ) -> Tensor:
        matrix = weight.to(rows.dtype)
        parts = [
            _normalisers(part @ matrix.T, wanted, vocabulary, cap)
            for part, wanted in _in_chunks(vocabulary, rows, targets)
        ]
        normaliser, target = (torch.cat(every) for every in zip(*parts, strict=True))
        ctx.save_for_backward(rows, weight, targets, normaliser)
        ctx.vocabulary, ctx.cap = vocabulary, cap
        return torch.where(targets != IGNORE, target - normaliser, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, targets, normaliser = ctx.saved_tensors
        vocabulary, matrix = ctx.vocabulary, weight.to(rows.dtype)
        of_weight = _WeightGradient(rows.shape[0] > tokens_at_once(vocabulary.most_rows))
        of_rows, trained = torch.empty_like(rows), ctx.needs_input_grad[1]

        def chunk(part: Tensor, wanted: Tensor, scale: Tensor, upstream: Tensor, back: Tensor) -> None:
            logits = part @ matrix.T
            down = -upstream.to(scale.dtype)
            logits_to_gradients_(logits, wanted, vocabulary.first, scale, down, 0.0, ctx.cap)
            torch.mm(logits, matrix, out=back)
            if trained:
                of_weight.add(logits, part)

        for tensors in _in_chunks(vocabulary, rows, targets, normaliser, gradient, of_rows):
            chunk(*tensors)
        return of_rows, of_weight.take().to(weight.dtype) if trained else None, None, None, None


class _WeightGradient:
    """Adds the chunks' gradients of a head's weight up, in at least fp32 where there are several."""

    def __init__(self, several: bool) -> None:
        self.several = several
        self.sum: Tensor | None = None

    def add(self, logits: Tensor, rows: Tensor) -> None:
        if not self.several:
            self.sum = logits.T @ rows
        elif self.sum is None:
            self.sum = wide_product(logits.T, rows)
        else:
            add_product_(self.sum, logits.T, rows)

    def take(self) -> Tensor:
        assert self.sum is not None
        taken, self.sum = self.sum, None
        return taken


def _normalisers(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, cap: float | None
) -> tuple[Tensor, Tensor]:
    """For each token ln Σ exp(logit) over all ranks' rows, and the logit of its target."""
    found = token_statistics(logits, targets, vocabulary.first, cap)
    largest = found[0].clone()
    vocabulary.largest(largest)
    found[1] *= (found[0] - largest).exp()
    vocabulary.total(found[1:])
    return found[1].log() + largest, found[2]


def _to_gradients_(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, factor: float, z: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """As ``_normalisers``, and the logits become their gradients."""
    if isinstance(vocabulary, WholeVocabulary):
        found = gradients_in_one_kernel_(logits, targets, factor, z, cap)
        if found is not None:
            return found
    normaliser, target = _normalisers(logits, targets, vocabulary, cap)
    scale = torch.full_like(normaliser, factor)
    logits_to_gradients_(logits, targets, vocabulary.first, normaliser, scale, z, cap)
    return normaliser, target


def _sum(normaliser: Tensor, target: Tensor, targets: Tensor, z: float) -> Tensor:
    losses = normaliser - target
    if z:
        losses = losses + z * normaliser.square()
    return torch.where(targets != IGNORE, losses, 0).sum()
