"""Memory that attention's backward pass adds under context parallelism (``cp``); ``activations`` has what it saves.

ring     at the largest step: the entering gradient; the queries' gradient in at least fp32, before and after the
         update; gradients of keys and values, this rank's and those passing through. In buffers: keys and values of
         this step and the next, and incoming gradients.
ulysses  the entering gradient, as laid out for sending and as received; then what attention itself adds
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.predict.memory.block_workload import BlockWorkload


class ContextMoment(NamedTuple):
    """A candidate peak of attention's backward pass, beyond what attention saves."""

    activations: float
    buffers: float


def moments(query: int, key: int, value: int, work: BlockWorkload) -> list[ContextMoment]:
    """``query``, ``key``, ``value``: widths of all queries, keys and values of a token on this rank."""
    c, tokens = work.compute, work.tokens
    narrow, wide, pair = c * tokens * query, work.wide * tokens * query, c * tokens * (key + value)
    if work.context == "ulysses":
        return [ContextMoment(3 * narrow, 0.0), ContextMoment(2 * narrow + pair, 0.0)]
    # If the forward pass was recomputed, this rank's own keys and values are freed after the first ring step.
    gone = 0.0 if work.recompute == "none" else pair
    if work.cp == 2:
        return [ContextMoment(2 * narrow + wide + 2 * pair - gone, pair)]
    if work.cp == 3:
        return [
            ContextMoment(narrow + 2 * wide + 2 * pair - gone, 2 * pair),
            ContextMoment(narrow + wide + 2 * pair - gone, 3 * pair),
            ContextMoment(2 * narrow + wide + 3 * pair - gone, 2 * pair),
        ]
    return [ContextMoment(narrow + 2 * wide + 3 * pair - gone, 3 * pair)]
