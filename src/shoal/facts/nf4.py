"""NF4: frozen weights in 4 bits (QLoRA, arXiv 2305.14314), with a scale per 64 values.

A value is one of 16 levels, the quantiles of a normal distribution, times the largest magnitude among 64 neighbours in
its row. A row's bytes are its codes, two per byte, followed by its scales in fp32. Rows are independent, so a rank
with some of them, or with whole blocks of each, has the same values. Decided once here: the engine packs this way, and
memory and traffic are priced accordingly.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.parameters import (
    Parameter,
    block_parameters,
    expert_parameters,
    is_matrix,
    is_stack,
)
from shoal.facts.model.tensor_split import tensor_part

BLOCK = 64
SCALE_BYTES = 4
# Bytes per value: half a byte, plus its share of a scale.
WIDTH = Fraction(1, 2) + Fraction(SCALE_BYTES, BLOCK)
# The levels from the paper's appendix.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Values packed at a time and, without a kernel, unpacked at a time.
AT_ONCE = 1 << 20


def is_packed(parameter: Parameter) -> bool:
    """Whether the weight is stored in NF4."""
    return packs(parameter.name, parameter.shape)


def packs(name: str, shape: tuple[int, ...]) -> bool:
    """By canonical name: a block's projections, and those of its routed experts."""
    return is_matrix(name, shape) or is_stack(name, shape)


def unpacked_width(packed: int) -> int:
    """Values in a row of this many bytes."""
    # In integers, since torch 2.11 cannot compile fractions.
    return packed * BLOCK // (BLOCK // 2 + SCALE_BYTES)


def packed_width(values: int) -> int:
    """Bytes of a row with this many values, in whole blocks."""
    return int(values * WIDTH)


def cut_blocks(model: Model, layout: Layout) -> Iterator[str]:
    """Projections of which tensor ranks would cut a block of 64 values."""
    for parameter in (
        *block_parameters(model, False),
        *block_parameters(model, True),
        *expert_parameters(model),
    ):
        if is_packed(parameter) and tensor_part(parameter, layout.tp, 0).box.shape[1] % BLOCK:
            yield parameter.name.rsplit(".", 2)[-2]
