"""Cross-entropy of a linear head that never holds all logits.

Two forms. ``summed_cross_entropy``, for training, computes its gradients in the forward pass: a chunk's logits become
their own gradients in place, are multiplied into the gradients of the hidden states and of the head's weight, and
freed. Nothing is computed twice, and only tensors the size of the hidden states and the weight wait for the backward
pass. ``token_log_probabilities``, for losses built from them, takes any upstream gradient and so must recompute a
chunk's logits in the backward pass.
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
    """The head's rows on this rank, and the reductions with ranks that hold other rows."""

    @property
    def first(self) -> int: ...

    @property
    def most_rows(self) -> int:
        """The most rows of any rank."""

    def largest(self, values: Tensor) -> None:
        """Maximum over all ranks, in place."""

    def total(self, values: Tensor) -> None:
        """Sum over all ranks, in place."""


class WholeVocabulary:
    """All rows are on this rank."""

    first = 0

    def __init__(self, rows: int) -> None:
        self.most_rows = rows

    def largest(self, values: Tensor) -> None: ...

    def total(self, values: Tensor) -> None: ...


class PendingWeightGradient:
    """Accumulates a head's weight gradient over micro-batches whose backward pass is still to come.

    Schedules that run several forward passes before the first backward pass would otherwise hold one gradient for
    each.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.sum: Tensor | None = None

    def add(self, gradient: Tensor, dtype: torch.dtype) -> None:
        """``dtype``: the precision of the accumulator."""
        self.passes += 1
        self.sum = gradient.to(dtype) if self.sum is None else self.sum.add_(gradient)

    def take(self) -> Tensor | None:
        """The sum, on the last of the passes that contribute to it; None before."""
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

    Its gradients are those of factor · Σ: computed before the backward pass, they would otherwise be rounded twice.
    ``z`` adds z · ln² Σ exp per such token, which keeps logits from drifting. ``pending`` accumulates the weight
    gradient over several calls, in the precision of gradient accumulation, and returns it with the last backward pass;
    these passes must begin here, with a gradient of 1. Without it, a gradient is rounded to the weight's precision,
    and the backward pass may begin anywhere. With a ``cap``, logits are cap · tanh(x·Wᵀ / cap).
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
    """[N]: log-probability of each token's target, 0 if it does not count."""
    found: Tensor = _TokenLogProbabilities.apply(rows, weight, targets, vocabulary, cap)
    return found


def _in_chunks(vocabulary: Vocabulary, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks sized by the largest part of any rank: ranks communicate in every chunk, so all need equally many."""
    at_once = tokens_at_once(vocabulary.most_rows)
    return zip(*(tensor.split(at_once) for tensor in tensors), strict=True)


class _SummedCrossEntropy(torch.autograd.Function):
    """Computes its gradients in the forward pass; the backward pass multiplies them by the upstream gradient."""

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
    """Accumulates the chunks' gradients of a head's weight, in at least fp32 if there are several."""

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
    """Like ``_normalisers``, and turn the logits into their gradients."""
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
