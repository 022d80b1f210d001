"""How many logits a rank holds at once, which determines the number of chunks in the loss."""

from __future__ import annotations

# Beyond this, tokens pass through the head in chunks. Every chunk accumulates into the head's weight gradient, which
# costs a read and a write of it, so chunks are large: 8,000 tokens of a 128k vocabulary, in 2 GiB of bf16.
LOGITS_AT_ONCE = 2**30


def at_once(gpu: bool, capped: bool) -> bool:
    """Whether one kernel computes statistics and gradients of logits, given a whole vocabulary on a rank."""
    return gpu and not capped


def tokens_at_once(vocabulary_rows: int) -> int:
    """Tokens per chunk, if each has this many logits on a rank."""
    return max(1, LOGITS_AT_ONCE // vocabulary_rows)
