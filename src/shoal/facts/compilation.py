"""Whether a job's blocks are compiled, and if not, why: decided once, for the engine and for predictions."""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.layout import Layout
from shoal.facts.recipe import Precision
from shoal.facts.schedules.programs import SPLIT_BACKWARD


class Compilation(NamedTuple):
    """The decision. ``why_not`` is for a user who requested compilation, or whose GPU would have had it."""

    on: bool
    why_not: str = ""


def compilation(
    enabled: bool | None, on_gpu: bool, layout: Layout, precision: Precision, strict: bool
) -> Compilation:
    """``enabled``: the config's value; None leaves it to the device, except that fp64, the reference, runs eager."""
    wanted = on_gpu and precision != "fp64" if enabled is None else enabled
    if not wanted:
        return Compilation(False)
    if strict:
        return Compilation(
            False, "strict mode runs eager: a fused kernel rounds as its shape and device have it"
        )
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        # A compiled block is one autograd node, so its backward pass cannot be split.
        return Compilation(
            False, f"schedule={layout.schedule} splits backward passes, so blocks run eager; 1f1b compiles"
        )
    return Compilation(True)
