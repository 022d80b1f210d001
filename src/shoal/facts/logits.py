"""How many logits a rank holds at once, which sets the number of chunks in the loss."""

from __future__ import annotations

# Beyond this many, tokens go through the head in chunks that are computed again in the backward pass; large enough
# that a chunk of a 128k vocabulary still has a thousand rows to multiply.
LOGITS_AT_ONCE = 2**27


def tokens_at_once(vocabulary_rows: int) -> int:
    """Tokens in a chunk, where each has this many logits on a rank."""
    return max(1, LOGITS_AT_ONCE // vocabulary_rows)
