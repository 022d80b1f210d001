"""Blockwise 8-bit optimizer states (``recipe.states = "int8"``): where blocks lie, and which splits of a matrix
respect them.

The elements of a block share a scale, so no split may cut a block. Blocks lie within rows and depend only on the shape
of the whole matrix, so they are the same in every layout. ``zero=3`` and column-wise tensor parallelism split between
rows; buckets of ``zero=1|2`` are split between blocks; row-wise tensor parallelism splits a row into equal parts, up
to ``ROW_CUTS``.

Vectors (norms and biases) have no blocks: their moments are fp32.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from shoal.facts.model import Model
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.model.tensor_split import tensor_part

# The most elements per block; its scale is one byte.
LONGEST_BLOCK = 256
# A row may be split into this many equal parts, where the division is exact, without cutting a block.
ROW_CUTS = 8
# Names of the scales of AdamW's two moments.
SCALE_OF = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}
SCALES = tuple(SCALE_OF.values())
# Bytes per element of a moment without its scale, and of a vector's.
CODE_BYTES, VECTOR_BYTES = 1, 4


@lru_cache(maxsize=1024)
def block_length(shape: tuple[int, ...]) -> int | None:
    """The block length for a whole parameter of this shape; None: it has no blocks."""
    if len(shape) < 2:
        return None
    part = shape[-1] // gcd(shape[-1], ROW_CUTS)
    return next(one for one in range(min(part, LONGEST_BLOCK), 0, -1) if part % one == 0)


def moment_bytes(shape: tuple[int, ...], elements: int) -> int:
    """Bytes of one of AdamW's moments, for this many elements of such a parameter."""
    block = block_length(shape)
    return VECTOR_BYTES * elements if block is None else CODE_BYTES * elements + elements // block


@lru_cache(maxsize=1024)
def cuts_a_block(model: Model, tp: int) -> str | None:
    """The first matrix of which ``tp`` tensor ranks would cut a block, or None."""
    for one in llama_parameters(model):
        block = block_length(one.shape)
        if block is None or one.split != "row":
            continue
        boxes = [tensor_part(one, tp, index).box for index in range(tp)]
        if any(box.offset[-1] % block or box.shape[-1] % block for box in boxes):
            return one.name
    return None
