"""Whether a job's blocks are compiled and, where not, why: decided once, for the engine and for predictions."""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.layout import Layout
from shoal.facts.recipe import Precision
from shoal.facts.schedules.programs import SPLIT_BACKWARD


class Compilation(NamedTuple):
    """A decision. ``why_not`` is for a user who asked for compiled blocks, or whose GPU would have had them."""

    on: bool
    why_not: str = ""


def compilation(
    enabled: bool | None, on_gpu: bool, layout: Layout, precision: Precision, strict: bool
) -> Compilation:
    """``enabled`` is what the config says: None leaves it to the device, and fp64, which is for reference, eager."""
    wanted = on_gpu and precision != "fp64" if enabled is None else enabled
    if not wanted:
        return Compilation(False)
    if strict:
        return Compilation(
            False, "strict mode runs eager: a fused kernel rounds as its shape and device have it"
        )
    if enabled is None and layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        # No GPU has run them yet, so neither their speed nor their peaks are known.
        return Compilation(
            False,
            f"schedule={layout.schedule} splits backward passes, which compiled blocks do only where "
            "compile.enabled=true asks for it; 1f1b compiles by default",
        )
    return Compilation(True)
