"""Text generation: sample each token from the scores that follow the previous ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.models import random

# Tokens [B, T] in, scores [B, vocabulary] of the next token out.
Score = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TokenCandidates:
    """Which tokens may be sampled: the ``top_k`` most likely (0: all), and of those the most likely that reach
    ``top_p``.
    """

    top_k: int = 0
    top_p: float = 1.0

    def of(self, scores: Tensor) -> Tensor:
        """Scores [B, vocabulary] with all other tokens at minus infinity."""
        if self.top_k:
            least = scores.topk(min(self.top_k, scores.shape[-1]), dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = scores.sort(dim=-1, descending=True)
            shares = ordered.softmax(-1)
            # The most likely token always stays, and so does the one that reaches the share.
            beyond = shares.cumsum(-1) - shares >= self.top_p
            scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
        return scores


ALL = TokenCandidates()


@torch.no_grad()
def generate(
    score: Score,
    tokens: Tensor,
    count: int,
    temperature: float,
    key: int,
    end: int | None = None,
    longest: int | None = None,
    candidates: TokenCandidates = ALL,
    told: Callable[[Tensor], None] = lambda tokens: None,
) -> Tensor:
    """Append up to ``count`` tokens to each row of [B, T]; a row that reaches ``end`` is padded with it.

    Temperature 0 is greedy. Sampling hashes (key, row, step, token). ``longest``: the network's context length.
    Samples during training use no key/value cache: they are short, and so they run the same forward pass as training,
    in any layout; a ``score`` may have one. ``told`` is called with all tokens so far.
    """
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    row_keys = random.bits(key, rows)
    ended = torch.zeros_like(rows, dtype=torch.bool)
    for step in range(count):
        scores = score(tokens if longest is None else tokens[:, -longest:]).double()
        if temperature > 0:
            scores = candidates.of(scores / temperature) + gumbel(row_keys, step, scores.shape[-1])
        chosen = scores.argmax(-1)
        if end is not None:
            chosen = torch.where(ended, end, chosen)
            ended = ended | (chosen == end)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        told(tokens)
        if end is not None and bool(ended.all()):
            break
    return tokens


def gumbel(row_keys: Tensor, step: int, vocab: int) -> Tensor:
    """Noise [B, vocab] that turns the largest score into a sample of the softmax."""
    step_keys = random.bits(row_keys, torch.full_like(row_keys, step))
    drawn = random.uniform(step_keys[:, None], torch.arange(vocab, device=row_keys.device))
    return -(-drawn.log()).log()
