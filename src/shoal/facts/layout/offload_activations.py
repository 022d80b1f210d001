"""Which blocks' activations wait off the device under ``offload=activations``, and how early they come back."""

from __future__ import annotations

# How many blocks before its own backward pass begins what a block kept starts on its way back. One is enough: beside
# it runs a block's backward pass, with a forward pass repeated, and the copy is of what one block keeps.
HORIZON = 1


def blocks_away(blocks: int, fraction: float, first: bool, last: bool) -> range:
    """Of a stage's blocks, the first of this fraction: they wait longest.

    ``first``, ``last``: whether it is the network's first stage, its last. What enters any other than the first has
    come from another stage and is held until its gradient goes there, so its first block has nothing to send away. At
    the end of the network the backward pass follows at once: the last blocks' would come back as they leave.
    """
    start = 0 if first else 1
    stop = int(fraction * blocks + 0.5)
    if last:
        stop = min(stop, blocks - HORIZON)
    return range(start, max(start, stop))
