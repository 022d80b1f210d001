"""Products in fp8: what their operands' sizes must be multiples of, which scales a weight has, and how it travels.

The engine notes the largest values of its weights as listed here and sends them around, and gathers as decided here;
traffic and memory are predicted from the same.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.precision import compute_width
from shoal.facts.recipe import Recipe, Scaling

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


def rounded_before_gathering(scaling: Scaling) -> bool:
    """Whether ranks that share out a projection's rows (``zero=3``) round them, and then gather.

    One scale serves both products of a weight. Scales of rows do not: in the backward pass its columns have theirs, and
    rounded by row it would be another weight. So there it is gathered in the compute precision.
    """
    return scaling == "tensorwise"


def gathered_width(recipe: Recipe) -> int:
    """Bytes of a value of such a weight as it is gathered; all other parameters' are of the compute precision."""
    rounded = recipe.precision == "fp8" and rounded_before_gathering(recipe.fp8)
    return 1 if rounded else compute_width(recipe)


def gathered_alike(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether a block's parameter is such a weight, of which all ranks have equally many rows: nothing is padded."""
    return len(shape) == 2 and shape[0] % ranks == 0


def scale_slots(scaling: Scaling, outputs: int, inputs: int, by_input: bool) -> list[ScaleSlot]:
    """Of one rank's part of a weight. ``by_input``: tensor ranks have other inputs of it, otherwise other outputs."""
    if scaling == "tensorwise":
        return [ScaleSlot(1, True)]
    return [ScaleSlot(outputs, by_input), ScaleSlot(inputs, not by_input)]
