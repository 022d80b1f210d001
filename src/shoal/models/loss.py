"""Head and loss: hidden states and targets in, summed loss and number of targets out.

Returns sums and counts instead of a mean: only the caller knows how many targets the whole step has, over all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.facts.targets import IGNORE
from shoal.models.cross_entropy import (
    PendingWeightGradient,
    Vocabulary,
    WholeVocabulary,
    summed_cross_entropy,
    token_log_probabilities,
)
from shoal.models.linear import Embedding


class Head(nn.Module):
    """Maps hidden states to logits and to the loss. If tied, it uses the embedding's weight."""

    def __init__(
        self,
        hidden: int,
        vocab: int,
        tied: Embedding | None,
        z_loss: float = 0.0,
        cap: float | None = None,
    ) -> None:
        """``cap``: logits are cap · tanh(logit / cap)."""
        super().__init__()
        if tied is None:
            self.weight = nn.Parameter(torch.empty(vocab, hidden))
        # The module instead of its parameter, because to_empty and FSDP replace parameters; in a tuple, so that torch
        # does not list the same parameter under a second name.
        self.tied = () if tied is None else (tied,)
        self.z_loss, self.cap = z_loss, cap
        self.factor, self.pending = 1.0, None

    factor: float
    pending: PendingWeightGradient | None

    def start_step(self, factor: float, pending: PendingWeightGradient | None) -> None:
        """Scale gradients by ``factor`` from now on: the forward pass computes them, so it must know the factor.

        ``pending`` accumulates the weight gradient over micro-batches, whose backward passes begin with the loss.
        """
        self.factor, self.pending = factor, pending

    def matrix(self) -> Tensor:
        """The parameter in use: its own, or the embedding's."""
        return self.tied[0].weight if self.tied else self.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] → [..., vocab] in at least fp32."""
        scores = F.linear(hidden, self.matrix().to(hidden.dtype))
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return wide if self.cap is None else torch.tanh(wide / self.cap) * self.cap

    def scores(self, hidden: Tensor, place: int) -> Tensor:
        """Scores [B, vocab] of the token after position ``place`` of hidden [B, T, hidden]."""
        return self.logits(hidden[:, place])

    def forward(self, hidden: Tensor, targets: Tensor, by_token: bool = False) -> tuple[Tensor, Tensor]:
        """Cross-entropy summed over the targets that count, and their number (int64).

        In training it includes z_loss; a validation loss is the cross-entropy alone. ``by_token``: instead of the sum,
        every target's log-probability, in a row, 0 for targets that do not count.
        """
        rows, wanted = self.enter(hidden).flatten(0, -2), targets.flatten()
        weight, vocabulary = self.matrix(), self.vocabulary()
        if by_token:
            return token_log_probabilities(rows, weight, wanted, vocabulary, self.cap), (
                wanted != IGNORE
            ).sum()
        z = self.z_loss if torch.is_grad_enabled() else 0.0
        loss = summed_cross_entropy(rows, weight, wanted, vocabulary, self.factor, z, self.pending, self.cap)
        return loss, (wanted != IGNORE).sum()

    def log_probabilities(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Log-probability of every target; 0 for those that do not count. Calls the module, so that hooks gather its
        weight.
        """
        found: Tensor
        found, _ = self(hidden, targets, by_token=True)
        return found.view(targets.shape)

    def enter(self, hidden: Tensor) -> Tensor:
        """Hook: all tokens of the micro-batch."""
        return hidden

    def vocabulary(self) -> Vocabulary:
        return WholeVocabulary(self.matrix().shape[0])
