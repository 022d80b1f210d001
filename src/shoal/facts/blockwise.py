"""States in 8 bits, block by block (``recipe.states = "int8"``): where blocks lie, and which cuts of a matrix they
bear.

The elements of a block share a scale, so a block must not be cut. Blocks lie in rows and depend on nothing but the
shape of the whole matrix: every layout has the same ones. Rows are what ``zero=3`` and column-wise tensor ranks cut
between; buckets of ``zero=1|2`` are cut between blocks; row-wise tensor ranks cut a row into equal parts, up to
``ROW_CUTS``.

Vectors, which norms and biases are, have no blocks: their moments are fp32.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from shoal.facts.model import Model
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.model.tensor_split import tensor_part

# Elements of a block, at most; its scale is a byte.
LONGEST_BLOCK = 256
# Into so many equal parts, as far as it divides, a row may be cut without cutting a block.
ROW_CUTS = 8
# The scales of AdamW's two moments, beside them.
SCALE_OF = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}
SCALES = tuple(SCALE_OF.values())
# Bytes of an element of a moment, without the scale; of a vector's.
CODE_BYTES, VECTOR_BYTES = 1, 4


@lru_cache(maxsize=1024)
def block_length(shape: tuple[int, ...]) -> int | None:
    """Of a parameter of this shape, which is the whole one's; None: it has no blocks."""
    if len(shape) < 2:
        return None
    part = shape[-1] // gcd(shape[-1], ROW_CUTS)
    return next(one for one in range(min(part, LONGEST_BLOCK), 0, -1) if part % one == 0)


def moment_bytes(shape: tuple[int, ...], elements: int) -> int:
    """Of one of AdamW's moments, of so many elements of such a parameter."""
    block = block_length(shape)
    return VECTOR_BYTES * elements if block is None else CODE_BYTES * elements + elements // block


@lru_cache(maxsize=1024)
def cuts_a_block(model: Model, tp: int) -> str | None:
    """The first matrix of which so many tensor ranks would cut a block; None: of no matrix."""
    for one in llama_parameters(model):
        block = block_length(one.shape)
        if block is None or one.split != "row":
            continue
        boxes = [tensor_part(one, tp, index).box for index in range(tp)]
        if any(box.offset[-1] % block or box.shape[-1] % block for box in boxes):
            return one.name
    return None
