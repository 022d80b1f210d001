"""8-bit codes that share a scale per block: how AdamW stores its moments with ``recipe.states = "int8"``.

A block's scale is a power of two above its largest magnitude, stored as its exponent in one byte. A code is a small
float of the scaled value with a 3-bit fraction: a first moment has a sign and spans 16 powers of two; a second moment,
whose values are squares, spans 32. Encoding and decoding use bit shifts and products with powers of two, which are
exact: the same on every device, in every layout, and however blocks are distributed. Values between two codes are
rounded stochastically (``train/rounding.py``) or to nearest.

A non-zero second moment never becomes zero, because the update divides by its root.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Bits of an fp32 number below the three bits of fraction that a code keeps.
DROPPED = 20
# fp32 exponents whose powers of two, and their inverses, are normal numbers.
LEAST, MOST = 1, 252
# A scaled block is below 1, also after rounding up: the greatest code is 0.875.
GREATEST = (126 << 3) + 6


class MomentCode(NamedTuple):
    """``first``: the upper bits of the fp32 number for code 1; ``codes``: how many magnitudes there are."""

    first: int
    signed: bool
    shift: int  # of its random bits among an element's 64

    @property
    def codes(self) -> int:
        return 127 if self.signed else 255

    @property
    def lowest(self) -> float:
        """The smallest non-zero magnitude."""
        return 2.0 ** ((self.first >> 3) - 127)


# The lowest 16 bits are for the weight.
MEAN = MomentCode(GREATEST - 126, True, 16)
SQUARE = MomentCode(GREATEST - 254, False, 36)


def scales(values: Tensor) -> Tensor:
    """One scale per block (row) of fp32 values: exponents, one byte each."""
    largest = values.abs().amax(-1)
    # Two eighths of margin: a value rounded up is still below the next power of two.
    exponents = (largest.view(torch.int32) + (2 << DROPPED)) >> 23
    return exponents.clamp_(LEAST, MOST).to(torch.uint8)


def encode(values: Tensor, scale: Tensor, code: MomentCode, drawn: Tensor | None) -> Tensor:
    """Encode fp32 values, one block per row. ``drawn``: 64 random bits per value; None rounds to nearest."""
    inverse = ((MOST + 1 - scale.to(torch.int32)) << 23).view(torch.float32).unsqueeze(-1)
    scaled = values.abs() * inverse
    if drawn is None:
        chance = torch.full((), 1 << (DROPPED - 1), dtype=torch.int32, device=values.device)
    else:
        chance = (drawn >> code.shift).bitwise_and_((1 << DROPPED) - 1).to(torch.int32)
    found = (scaled.view(torch.int32) + chance) >> DROPPED
    found = found.sub_(code.first - 1).clamp_(max=code.codes)
    if code.signed:
        # Below the lowest magnitude there is only zero.
        low = (chance < scaled * (2.0**DROPPED / code.lowest)).to(torch.int32)
    else:
        low = (scaled > 0).to(torch.int32)
    found = torch.where(scaled < code.lowest, low, found)
    if code.signed:
        found += (values < 0).to(torch.int32) << 7
    return found.to(torch.uint8)


def decode(codes: Tensor, scale: Tensor, code: MomentCode) -> Tensor:
    """Decode codes to fp32, one block per row."""
    wide = codes.to(torch.int32)
    magnitude = wide & code.codes
    found = ((magnitude + (code.first - 1)) << DROPPED).view(torch.float32)
    found = torch.where(magnitude > 0, found, 0.0)
    found *= ((scale.to(torch.int32) + 1) << 23).view(torch.float32).unsqueeze(-1)
    return torch.where(wide > code.codes, -found, found) if code.signed else found
