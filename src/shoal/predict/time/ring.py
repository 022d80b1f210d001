"""What ring attention (``cp_kind=ring``) computes in addition to attention over whole sequences.

Each step of the ring is a kernel of its own over one rank's keys, and the partial results are merged one by one.
Merging needs every query's log-sum-exp, which not every kernel returns: Shoal's engine then uses FlashAttention-2
instead of the vendor's kernel (``models/attention_rectangle.py``).
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.cluster.stack import Stack

# A kernel's start and end per query cost as much as this many keys: causal attention at head size 128 reaches 0.52 of
# its best rate with 512 tokens, 0.70 with 1024, 0.82 with 2048 and 0.91 with 4096 (FlashAttention-2 paper, A100),
# which have half as many keys on average.
STARTING = 220
# Kernels that one ring step launches besides attention, forward; and backward, to accumulate gradients.
OPERATORS = 10, 12


class TurnBytes(NamedTuple):
    """Bytes that a ring step moves per element of the queries, and of keys and values."""

    forward: float
    backward: float
    keys: float  # backward


# Ours, operator by operator (``parallel/ring.py``): a copy of the result so far in fp32; where queries see these keys
# (three in four) it is scaled, the new part scaled and added; gradients accumulate in fp32. Fused: parts read, the
# result written.
MERGED = {"eager": TurnBytes(8 + 0.75 * 26, 8 + 0.75 * 10, 14), "fused": TurnBytes(10, 8, 6)}


def turn_length(seq: int, turns: int) -> int:
    """The length of whole causal attention whose queries see as many keys on average as in one ring step."""
    return max(1, seq // turns)


def shorter(seq: int, turns: int) -> float:
    """How many times longer all ring steps take than one kernel over whole sequences."""
    return (1 + 2 * STARTING / turn_length(seq, turns)) / (1 + 2 * STARTING / seq)


def merged(stack: Stack, turns: int, queries: float, keys: float) -> tuple[float, float]:
    """Bytes forward and backward, for this many elements of queries, and of keys with values."""
    each = MERGED[stack.merges]
    return turns * queries * each.forward, turns * (queries * each.backward + keys * each.keys)
