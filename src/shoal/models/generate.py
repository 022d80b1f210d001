"""Generate tokens: each drawn from the scores of what follows the ones before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.models import random

# Tokens [B, T] in, the scores [B, vocabulary] of the token after the last one out.
Score = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TokenCandidates:
    """Which tokens may be drawn: the ``top_k`` likeliest (0: all), of those the likeliest that make up ``top_p``."""

    top_k: int = 0
    top_p: float = 1.0

    def of(self, scores: Tensor) -> Tensor:
        """Scores [B, vocabulary] with all others at minus infinity."""
        if self.top_k:
            least = scores.topk(min(self.top_k, scores.shape[-1]), dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = scores.sort(dim=-1, descending=True)
            shares = ordered.softmax(-1)
            # The likeliest stays in any case, and so does the one that reaches the share.
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
    """Append up to ``count`` tokens to each row of [B, T]; a row that met ``end`` is filled up with it.

    Temperature 0 is greedy. The draw hashes (key, row, step, token). ``longest`` is how many tokens of context the
    network takes. Samples during training have no key/value cache: they are short, and this way they take the same
    forward pass as training does, in any layout; a ``score`` may have one. ``told`` is called with all tokens so far.
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
    """Noise [B, vocab] that turns the largest score into a sample of their softmax."""
    step_keys = random.bits(row_keys, torch.full_like(row_keys, step))
    drawn = random.uniform(step_keys[:, None], torch.arange(vocab, device=row_keys.device))
    return -(-drawn.log()).log()
