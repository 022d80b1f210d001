"""Head and loss: hidden states and targets in, summed loss and number of targets out.

Sums and counts and not a mean: only the caller knows how many targets the whole step has, over all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.facts.logits import tokens_at_once
from shoal.facts.targets import IGNORE
from shoal.models.linear import Embedding


class Head(nn.Module):
    """From hidden states to logits and to the loss. Tied: it borrows the embedding's weight."""

    def __init__(self, hidden: int, vocab: int, tied: Embedding | None) -> None:
        super().__init__()
        if tied is None:
            self.weight = nn.Parameter(torch.empty(vocab, hidden))
        # The module and not its parameter, because to_empty and FSDP put new parameters in its place; in a
        # tuple, so that torch does not list the same parameter under a second name.
        self.tied = () if tied is None else (tied,)

    def matrix(self) -> Tensor:
        """The parameter in use: our own, or the embedding's."""
        return self.tied[0].weight if self.tied else self.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] → [..., vocab] in at least fp32."""
        scores = F.linear(hidden, self.matrix().to(hidden.dtype))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def scores(self, hidden: Tensor, place: int) -> Tensor:
        """What the network says about the token after position ``place`` of hidden [B, T, hidden]: [B, vocab]."""
        return self.logits(hidden[:, place])

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy summed over the targets that count, and how many do (int64)."""
        rows, wanted = hidden.flatten(0, -2), targets.flatten()
        count = (wanted != IGNORE).sum()
        at_once = tokens_at_once(self.matrix().shape[0])
        if rows.shape[0] <= at_once:
            return self.summed(rows, wanted), count
        # No preserve_rng_state: nothing in a chunk draws random numbers.
        pieces = [
            checkpoint(self.summed, *piece, use_reentrant=False, preserve_rng_state=False)
            for piece in zip(torch.split(rows, at_once), torch.split(wanted, at_once), strict=True)
        ]
        return torch.stack(pieces).sum(), count

    def summed(self, rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(rows), wanted, ignore_index=IGNORE, reduction="sum")
