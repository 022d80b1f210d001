"""Precisions: bytes per value by purpose. The single table behind memory, traffic and time."""

from __future__ import annotations

from shoal.facts.blockwise import CODE_BYTES, LONGEST_BLOCK
from shoal.facts.recipe import Recipe

# fp8 applies only to matrix products: activations between them, messages, and what autograd saves are bf16; only
# weights may be all-gathered in fp8 (``layout/float8.py``). With tf32, fp32 values are multiplied in tf32.
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
# int8 applies only to moments: weights and their gradients are then bf16.
STATE_BYTES = {"fp32": 4, "bf16": 2, "int8": 2}
# Per moment, with its share of a scale at the longest block length (``facts/blockwise.py``).
MOMENT_BYTES: dict[str, float] = {**STATE_BYTES, "int8": CODE_BYTES + 1 / LONGEST_BLOCK}
REDUCE_BYTES = {"fp32": 4, "bf16": 2}


def compute_width(recipe: Recipe) -> int:
    """Bytes of an activation, and of a parameter on use."""
    return COMPUTE_BYTES[recipe.precision]


def state_width(recipe: Recipe) -> int:
    """Bytes of a stored parameter and, except for int8, of its optimizer states; under fp64 everything is fp64."""
    return 8 if recipe.precision == "fp64" else STATE_BYTES[recipe.states]


def weight_width(recipe: Recipe) -> int:
    """Bytes of a whole parameter as the network reads it: a working copy is narrower than its state."""
    return min(compute_width(recipe), state_width(recipe))


def gradient_width(recipe: Recipe) -> int:
    """Bytes of a parameter's gradient: as wide as the stored parameter."""
    return state_width(recipe)


def reduce_width(recipe: Recipe) -> int:
    """Bytes of a gradient in a reduction."""
    return 8 if recipe.precision == "fp64" else REDUCE_BYTES[recipe.reduce]


def orthogonal_width(recipe: Recipe) -> int:
    """Bytes per element of a matrix while Muon orthogonalises it: the compute precision, except for fp16's range."""
    return 4 if recipe.precision == "fp16" else compute_width(recipe)
