"""Memory of attention over context ranks (``cp``): what it keeps is attention's; here, what its backward pass adds.

ring     in the turn that holds the most: the gradient that enters; that of the queries, in at least fp32, as it was
         and as it becomes; gradients of keys and values, this rank's own and those that pass through. In buffers:
         keys and values of this turn, of the next one, and gradients that come in.
ulysses  the gradient that enters, as it is laid out to be sent, and as it arrives; then what attention itself adds
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.predict.memory.block_workload import BlockWorkload


class ContextMoment(NamedTuple):
    """A moment of attention's backward pass, beyond what attention keeps."""

    activations: float
    buffers: float


def moments(query: int, key: int, value: int, work: BlockWorkload) -> list[ContextMoment]:
    """The widths are those of all queries, keys and values of a token on this rank."""
    c, tokens = work.compute, work.tokens
    narrow, wide, pair = c * tokens * query, work.wide * tokens * query, c * tokens * (key + value)
    if work.context == "ulysses":
        return [ContextMoment(3 * narrow, 0.0), ContextMoment(2 * narrow + pair, 0.0)]
    # Where the forward pass was repeated, this rank's own keys and values are let go of after the first turn.
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
