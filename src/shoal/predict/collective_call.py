"""CollectiveCall: one kind of collective that a rank issues, with its count per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "forward",
    "backward",
    "recompute",
    "gradients",  # reductions over ranks
    "gather forward",  # all-gathers of parameters before use
    "gather backward",
    "update",  # all-gathers of parameters after the optimizer
    "message",  # sends and receives between pipeline stages
    "control",
]


# Not frozen: a planner creates a million of these, and freezing triples the cost.
@dataclass(slots=True)
class CollectiveCall:
    """Equal calls of one operation in one group. ``bytes`` is one call's largest buffer.

    ``group`` is an axis of the layout; several axes that act as one (``fsdp·cp``); what expert parallelism leaves of
    those (``fsdp·cp/ep``, ``dp/ep``); the tensor ranks that share a key/value head (``tp copies``); the two ends of a
    pipeline (``pp ends``); or all ranks, over their devices (``everyone``) or their hosts (``control``).
    """

    op: str
    group: str
    bytes: int
    count: int
    phase: Phase
