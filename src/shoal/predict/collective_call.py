"""Call: a collective, as often as one rank issues it in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "forward",
    "backward",
    "recompute",
    "gradients",  # sums over ranks
    "gather forward",  # parameters, before they are used
    "gather backward",
    "update",  # parameters, after the optimizer
    "message",  # between pipeline stages
    "control",
]


# Not frozen: a planner makes a million of them, and freezing trebles what that takes.
@dataclass(slots=True)
class CollectiveCall:
    """Equal calls of one operation in one group. ``bytes`` is one call's largest buffer.

    ``group`` is an axis of the layout; several axes that act as one (``fsdp·cp``); what expert parallelism leaves of
    those (``fsdp·cp/ep``, ``dp/ep``); the tensor ranks that share a key/value head (``tp copies``); the two ends of a
    pipeline (``pp ends``); or all ranks, by their devices (``everyone``) or their hosts (``control``).
    """

    op: str
    group: str
    bytes: int
    count: int
    phase: Phase
