"""The router: which experts each token is sent to, with which weights, and the losses that balance the experts.

Routing depends only on the token and the weights: scores are computed in at least fp32, ties go to the lower expert
number, and no token is dropped. So it is the same in every layout.

The two losses are sums over units that no layout splits: the balance of experts over one sequence at a time (as in
DeepSeek-V3), and the squared log-normaliser of every token. Both are summed over layers, and averaged over the
sequences, or tokens, of the global batch. A balance per micro-batch, as others have it, would differ between layouts.

    balance of a sequence of T tokens    E / (k·T²) · Σ_e (tokens sent to e) · (Σ_t probability of e), 1 where even
    z of a token                         (ln Σ_e exp logit_e)²
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.facts.model import Experts, Model

LEAST = 1e-20


class RouterLosses(NamedTuple):
    """Weights of a sequence's balance and of a token's z in the step's loss."""

    balance: float = 0.0
    z: float = 0.0


class Routing(NamedTuple):
    """For tokens [B, T]: their experts, best first, and the weight of each expert's output."""

    weights: Tensor  # [B, T, active], in at least fp32
    chosen: Tensor  # int64 [B, T, active]


class Router(nn.Module):
    """Scores all experts for each token and chooses the few it is sent to."""

    def __init__(self, model: Model, losses: RouterLosses) -> None:
        super().__init__()
        assert model.experts is not None
        self.weight = nn.Parameter(torch.empty(model.experts.count, model.hidden))
        correction = torch.empty(model.experts.count) if model.experts.router_bias else None
        # Added to scores only for the choice of experts, so it has no gradient. It is a parameter so that it is
        # sharded, replicated and checkpointed like the others; ``RouterTally.balance`` updates it.
        self.e_score_correction_bias = None if correction is None else nn.Parameter(correction)
        self.experts = model.experts
        self.losses = losses
        # Hook that completes a sequence's token counts, [B, experts], if other ranks have some of its tokens.
        self.complete: Callable[[Tensor], Tensor] = _as_it_is
        self.counting = False

    tally: Tensor
    factors: Tensor

    def prepare(self, device: torch.device) -> None:
        """Start counting tokens and adding the losses."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        # Its gradient accumulates over a step's backward passes: tokens sent to each expert, the balance and z. It is
        # not a parameter, since the optimizer does not update it; but as for one, autograd adds once per forward pass,
        # however often that is recomputed.
        self.tally = torch.zeros(self.experts.count + 2, dtype=wide, device=device, requires_grad=True)
        self.factors = torch.zeros(2, dtype=wide, device=device)
        self.counting = True

    def start_step(self, scale: float) -> None:
        """Reset the counts; the losses' gradients are multiplied by ``scale``."""
        self.tally.grad = None
        for number, weight in enumerate(self.losses):
            self.factors[number].fill_(weight * scale)

    def forward(self, x: Tensor) -> Routing:
        logits: Tensor = _Logits.apply(x, self.weight)
        scores = logits.softmax(-1) if self.experts.score == "softmax" else logits.sigmoid()
        correction = self.e_score_correction_bias
        wanted = scores if correction is None else scores + correction.detach().to(scores.dtype)
        chosen = choose(wanted, self.experts)
        weights = scores.gather(-1, chosen)
        if self.experts.normalized:
            # A sigmoid may return only zeros.
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if self.experts.score == "softmax" else total + LEAST)
        if self.experts.scale != 1.0:
            weights = weights * self.experts.scale
        if self.counting and torch.is_grad_enabled():
            weights = self._count(weights, chosen, logits, scores)
        return Routing(weights, chosen)

    def _count(self, weights: Tensor, chosen: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        sent = per_sequence(chosen, self.experts.count, scores.dtype)
        balance = z = scores.new_zeros(())
        if self.losses.balance:
            balance = self._balance(self.complete(sent), scores)
        if self.losses.z:
            z = logits.logsumexp(-1).square().sum()
        added = self.factors[0] * balance + self.factors[1] * z
        seen = torch.cat([sent.sum(0), torch.stack([balance, z]).detach()])
        counted: Tensor = _AddLoss.apply(weights, added, seen, self.tally, self.e_score_correction_bias)
        return counted

    def _balance(self, sent: Tensor, scores: Tensor) -> Tensor:
        """The balance of the tokens on this rank; ``sent`` counts all tokens of their sequences."""
        # Sigmoid scores are not probabilities yet.
        shares = scores if self.experts.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        routed = sent.sum(-1)  # k·T
        per_row = (sent * shares.sum(1)).sum(-1)
        return (per_row * (self.experts.count * self.experts.active) / routed.square()).sum()


def choose(scores: Tensor, experts: Experts) -> Tensor:
    """The experts of each token, best first; ties go to the lower number.

    With groups, such as the experts of one node, only experts of the best groups, ranked by the sum of their two best
    experts.
    """
    scores = scores.detach()
    if experts.active_groups < experts.groups:
        grouped = scores.unflatten(-1, (experts.groups, -1))
        standing = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        passed = torch.zeros_like(standing, dtype=torch.bool)
        passed.scatter_(-1, _best(standing, experts.active_groups), True)
        scores = grouped.masked_fill(~passed[..., None], -torch.inf).flatten(-2)
    return _best(scores, experts.active)


def _best(scores: Tensor, count: int) -> Tensor:
    """Repeated argmax, which takes the first of equals: topk leaves their order undefined, and a sort is slower."""
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    chosen: list[Tensor] = []
    for _ in range(count):
        chosen.append(scores.argmax(-1, keepdim=True))
        scores = torch.where(numbers == chosen[-1], -torch.inf, scores)
    return torch.cat(chosen, -1)


def per_sequence(chosen: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """The number of each sequence's tokens sent to each expert: [B, experts]."""
    sent = torch.zeros(chosen.shape[0], experts, dtype=dtype, device=chosen.device)
    # Sums of ones are exact in any order.
    return sent.scatter_add(1, chosen.flatten(1), sent.new_ones(()).expand_as(chosen.flatten(1)))


def _as_it_is(counts: Tensor) -> Tensor:
    return counts


class _Logits(torch.autograd.Function):
    """x·Wᵀ in at least fp32. Saves x itself instead of a widened copy.

    Products of bf16 are exact in fp32: a GPU's tensor cores multiply bf16 directly and accumulate in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # A frozen router does not save its input.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.dtype, ctx.as_they_are = x.dtype, _as_they_are(x, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        if ctx.as_they_are:
            return torch.mm(x.flatten(0, -2), weight.T, out_dtype=wide).unflatten(0, x.shape[:-1])
        return torch.nn.functional.linear(x.to(wide), weight.to(wide))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        if ctx.as_they_are:
            gradient = gradient.to(ctx.dtype)
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            rows = gradient.flatten(0, -2)
            of_weight = (rows.T @ x.flatten(0, -2).to(gradient.dtype)).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight.to(gradient.dtype)).to(ctx.dtype)
        return of_x, of_weight


def _as_they_are(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16


class _AddLoss(torch.autograd.Function):
    """Attaches a loss to a tensor: the value passes through unchanged, and its backward pass also starts the loss's.

    The statistics seen in the forward pass become the gradient of ``tally``, where autograd accumulates them.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, added: Tensor, seen: Tensor, tally: Tensor, correction: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(seen)
        ctx.correction = None if correction is None else correction.dtype
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, Tensor, Tensor | None]:
        (seen,) = ctx.saved_tensors
        one = torch.ones((), dtype=gradient.dtype, device=gradient.device)
        # A reducer waits for a gradient of every parameter.
        nothing = None if ctx.correction is None else torch.zeros_like(seen[:-2], dtype=ctx.correction)
        return gradient, one, None, seen, nothing
