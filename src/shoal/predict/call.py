"""Call: a collective, as often as one rank issues it in a step, and how wide the numbers are that travel in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.facts.recipe import Recipe

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
class Call:
    """Equal calls of one operation in one group. ``bytes`` is one call's largest buffer.

    ``group`` is an axis of the layout; several axes that act as one (``fsdp·cp``); what expert parallelism leaves of
    those (``fsdp·cp/ep``, ``dp/ep``); the tensor ranks that share a key/value head (``tp copies``); the two ends of a
    pipeline (``pp ends``); or ``control``, all ranks.
    """

    op: str
    group: str
    bytes: int
    count: int
    phase: Phase


# fp8 is what matrix products read; what travels between ranks stays in bf16.
_COMPUTE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
_STATES = {"fp32": 4, "bf16": 2, "int8": 1}


def compute_width(recipe: Recipe) -> int:
    """Bytes of an activation, and of a parameter where it is used."""
    return _COMPUTE[recipe.precision]


def state_width(recipe: Recipe) -> int:
    """Bytes of a parameter at rest, and of its gradient; fp64 keeps everything in fp64."""
    return 8 if recipe.precision == "fp64" else _STATES[recipe.states]


def reduce_width(recipe: Recipe) -> int:
    """Bytes of a gradient on its way between ranks."""
    return 8 if recipe.precision == "fp64" else _STATES[recipe.reduce]
