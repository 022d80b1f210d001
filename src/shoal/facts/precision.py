"""Precisions: bytes of a value, by what it is used for. The one table that memory, traffic and time read."""

from __future__ import annotations

from shoal.facts.blockwise import CODE_BYTES, LONGEST_BLOCK
from shoal.facts.recipe import Recipe

# fp8 is a precision of matrix products: what lies or travels between them, and what autograd keeps, is bf16; gathered
# weights alone may be in fp8 (``layout/float8.py``). A device that is fast in tf32 multiplies fp32 values.
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
# int8 is a precision of moments alone: weights beside them, and their gradients, are bf16.
STATE_BYTES = {"fp32": 4, "bf16": 2, "int8": 2}
# A moment's, with its share of a scale where blocks are as long as they get (``facts/blockwise.py``).
MOMENT_BYTES: dict[str, float] = {**STATE_BYTES, "int8": CODE_BYTES + 1 / LONGEST_BLOCK}
REDUCE_BYTES = {"fp32": 4, "bf16": 2}


def compute_width(recipe: Recipe) -> int:
    """Bytes of an activation, and of a parameter where it is used."""
    return COMPUTE_BYTES[recipe.precision]


def state_width(recipe: Recipe) -> int:
    """Bytes of a parameter at rest, and of its optimizer states but for int8's; fp64 keeps everything in fp64."""
    return 8 if recipe.precision == "fp64" else STATE_BYTES[recipe.states]


def weight_width(recipe: Recipe) -> int:
    """Bytes of a whole parameter as the network reads it: a working copy is narrower than its state."""
    return min(compute_width(recipe), state_width(recipe))


def gradient_width(recipe: Recipe) -> int:
    """Bytes of a parameter's gradient: as the parameter rests."""
    return state_width(recipe)


def reduce_width(recipe: Recipe) -> int:
    """Bytes of a gradient on its way between ranks."""
    return 8 if recipe.precision == "fp64" else REDUCE_BYTES[recipe.reduce]


def orthogonal_width(recipe: Recipe) -> int:
    """Bytes of an element of a matrix as Muon makes it orthogonal: as the network computes, but for fp16's range."""
    return 4 if recipe.precision == "fp16" else compute_width(recipe)
