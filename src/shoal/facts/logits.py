"""How many logits a rank holds at once, which sets the number of chunks in the loss."""

from __future__ import annotations

# Beyond this many, tokens go through the head in chunks. Every chunk adds to the gradient of the head's weight, which
# costs as much as reading and writing that: so they are large, 8,000 tokens of a 128k vocabulary, in 2 GiB of bf16.
LOGITS_AT_ONCE = 2**30


def at_once(gpu: bool, capped: bool) -> bool:
    """Whether one kernel makes statistics and gradients of logits, of a vocabulary that is whole on a rank."""
    return gpu and not capped


def tokens_at_once(vocabulary_rows: int) -> int:
    """Tokens in a chunk, where each has this many logits on a rank."""
    return max(1, LOGITS_AT_ONCE // vocabulary_rows)
