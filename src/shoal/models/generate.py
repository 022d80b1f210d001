"""Generate a few tokens, to show during training what the network has learned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.models import random

# Tokens [B, T] in, the scores [B, vocabulary] of the token after the last one out.
Score = Callable[[Tensor], Tensor]


@torch.no_grad()
def generate(
    score: Score,
    tokens: Tensor,
    count: int,
    temperature: float,
    key: int,
    end: int | None = None,
    longest: int | None = None,
) -> Tensor:
    """Append up to ``count`` tokens to each row of [B, T]; a row that met ``end`` is filled up with it.

    There is no key/value cache: samples during training are short, and this way they take the same forward
    pass as training does, in any layout. Temperature 0 is greedy. The draw hashes (key, row, step, token).
    ``longest`` is how many tokens of context the network takes.
    """
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    row_keys = random.bits(key, rows)
    ended = torch.zeros_like(rows, dtype=torch.bool)
    for step in range(count):
        scores = score(tokens if longest is None else tokens[:, -longest:]).double()
        if temperature > 0:
            scores = scores / temperature + gumbel(row_keys, step, scores.shape[-1])
        chosen = scores.argmax(-1)
        if end is not None:
            chosen = torch.where(ended, end, chosen)
            ended = ended | (chosen == end)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        if end is not None and bool(ended.all()):
            break
    return tokens


def gumbel(row_keys: Tensor, step: int, vocab: int) -> Tensor:
    """Noise [B, vocab] that turns the largest score into a sample of their softmax."""
    step_keys = random.bits(row_keys, torch.full_like(row_keys, step))
    drawn = random.uniform(step_keys[:, None], torch.arange(vocab, device=row_keys.device))
    return -(-drawn.log()).log()
