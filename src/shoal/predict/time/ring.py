"""What ring attention (``cp_kind=ring``) computes beyond attention over whole sequences.

Each of a rank's turns is a kernel of its own, which attends to one rank's keys alone, and parts of a result are merged
one by one. Merging needs the logarithm of every query's sum, which not every kernel gives: Shoal's engine calls
FlashAttention-2's there, where it otherwise has the vendor's (``models/attention_rectangle.py``).
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.cluster.stack import Stack

# A query's start and end cost a kernel as much as so many keys: causal attention at head size 128 reaches 0.52 of its
# best rate with 512 tokens, 0.70 with 1024, 0.82 with 2048 and 0.91 with 4096 (figures of the FlashAttention-2 paper,
# A100), which have half as many keys on average.
STARTING = 220
# Kernels that one turn starts beside the attention itself, and as many that add up gradients.
OPERATORS = 10, 12


class TurnBytes(NamedTuple):
    """Bytes that a turn moves for an element of the queries, and of keys and values."""

    forward: float
    backward: float
    keys: float  # backward


# Ours, operator by operator (``parallel/ring.py``): a copy of the result so far in fp32; where queries see these keys,
# three in four, scaled, the part scaled, and added; gradients added in fp32. Fused: parts read, the result written.
MERGED = {"eager": TurnBytes(8 + 0.75 * 26, 8 + 0.75 * 10, 14), "fused": TurnBytes(10, 8, 6)}


def turn_length(seq: int, turns: int) -> int:
    """Of whole causal attention in which a query sees as many keys as in one turn, on average."""
    return max(1, seq // turns)


def shorter(seq: int, turns: int) -> float:
    """How many times as long all turns take as one kernel over whole sequences."""
    return (1 + 2 * STARTING / turn_length(seq, turns)) / (1 + 2 * STARTING / seq)


def merged(stack: Stack, turns: int, queries: float, keys: float) -> tuple[float, float]:
    """Bytes forward and backward, of so many elements of queries, and of keys with values."""
    each = MERGED[stack.merges]
    return turns * queries * each.forward, turns * (queries * each.backward + keys * each.keys)
