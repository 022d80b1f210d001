"""Products in fp8: what their operands' sizes must be multiples of, and which scales a weight has.

The engine notes the largest values of its weights as listed here and sends them around; traffic is predicted from the
same list.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.recipe import Scaling

# Kernels take rows and columns of operands in tiles.
TILE = 16
# They read a scale from an address that 16 bytes divide; scales have four.
ALIGNED = 4
SCALE_BYTES = 4


class ScaleSlot(NamedTuple):
    """The largest values of a weight's rows or columns, which are noted and sent together."""

    values: int
    over_tp: bool  # tensor ranks have other parts of these rows or columns; otherwise, other rows or columns

    @property
    def room(self) -> int:
        return -(-self.values // ALIGNED) * ALIGNED


def scale_slots(scaling: Scaling, outputs: int, inputs: int, by_input: bool) -> list[ScaleSlot]:
    """Of one rank's part of a weight. ``by_input``: tensor ranks have other inputs of it, otherwise other outputs."""
    if scaling == "tensorwise":
        return [ScaleSlot(1, True)]
    return [ScaleSlot(outputs, by_input), ScaleSlot(inputs, not by_input)]
