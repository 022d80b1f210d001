"""``offload=activations``: which blocks' activations move off the device, and how early they are prefetched."""

from __future__ import annotations

# How many blocks ahead of a block's backward pass its activations are fetched. One is enough: the copy of one
# block's activations overlaps one block's backward pass plus its recomputed forward pass.
HORIZON = 1


def blocks_away(blocks: int, fraction: float, first: bool, last: bool) -> range:
    """The first ``fraction`` of a stage's blocks: their activations are idle the longest.

    ``first``, ``last``: whether this is the network's first or last stage. In every stage but the first, the first
    block's input was received from another stage and stays on the device until its gradient is sent back, so that
    block has nothing to offload. At the end of the network the backward pass follows immediately, so the last
    blocks' activations would return as soon as they left.
    """
    start = 0 if first else 1
    stop = int(fraction * blocks + 0.5)
    if last:
        stop = min(stop, blocks - HORIZON)
    return range(start, max(start, stop))
