"""fp8 matrix products: alignment of their operands, the scales of a weight, and its precision in an all-gather.

The engine computes and exchanges each weight's largest values as listed here; traffic and memory are predicted from
the same decisions.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.precision import compute_width
from shoal.facts.recipe import Recipe, Scaling

# Kernels take rows and columns of operands in tiles of this many.
TILE = 16
# Kernels load scales from 16-byte-aligned addresses; a scale has 4 bytes.
ALIGNED = 4
SCALE_BYTES = 4


class ScaleSlot(NamedTuple):
    """The largest absolute values of a weight's rows or columns, computed and exchanged together."""

    values: int
    over_tp: bool  # tensor ranks hold other parts of the same rows or columns, not other rows or columns

    @property
    def room(self) -> int:
        return -(-self.values // ALIGNED) * ALIGNED


def rounded_before_gathering(scaling: Scaling) -> bool:
    """Whether ranks that shard a projection (``zero=3``) round it to fp8 before they all-gather it.

    Tensorwise, one scale serves both of a weight's products. Rowwise does not: the backward pass needs scales by
    column, and a weight already rounded by row would be a different one. So rowwise gathers in the compute
    precision.
    """
    return scaling == "tensorwise"


def gathered_width(recipe: Recipe) -> int:
    """Bytes per value of such a weight when gathered; all other parameters are gathered in the compute precision."""
    rounded = recipe.precision == "fp8" and rounded_before_gathering(recipe.fp8)
    return 1 if rounded else compute_width(recipe)


def gathered_alike(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether a block's parameter is such a weight and divides evenly over ranks, without padding."""
    return len(shape) == 2 and shape[0] % ranks == 0


def scale_slots(scaling: Scaling, outputs: int, inputs: int, by_input: bool) -> list[ScaleSlot]:
    """The scales of one rank's part of a weight. ``by_input``: tensor ranks split its inputs; otherwise its outputs."""
    if scaling == "tensorwise":
        return [ScaleSlot(1, True)]
    return [ScaleSlot(outputs, by_input), ScaleSlot(inputs, not by_input)]
