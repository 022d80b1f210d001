"""Weights in NF4 (``facts/nf4.py``): packed once, unpacked wherever they are used, in both passes.

What is unpacked is never kept: autograd would hold it until the backward pass, and with it the memory that packing
saves. So a product is a function of its own, which keeps the bytes and unpacks
them again for the gradient of its input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.facts.nf4 import AT_ONCE, BLOCK, LEVELS, packed_width, unpacked_width

PACKED = torch.uint8


def pack(rows: Tensor) -> Tensor:
    """Rows of whole blocks, as bytes. The nearest level; between two as near, the lower one."""
    count, width = rows.shape
    blocks = rows.to(torch.float32).view(count, width // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1)
    levels = torch.tensor(LEVELS, device=rows.device)
    # A block of zeros has a scale of zero; its values are the level of zero.
    shares = blocks / torch.where(scales > 0, scales, 1.0)[..., None]
    codes = torch.bucketize(shares, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(PACKED)
    first, second = codes.view(count, width // 2, 2).unbind(-1)
    return torch.cat([first << 4 | second, scales.view(PACKED)], 1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, bytes] → [rows, values], level times scale in fp32."""
    count, width = packed.shape[0], unpacked_width(packed.shape[1])
    step = max(1, AT_ONCE // width)
    if torch.compiler.is_compiling() or count <= step:
        return _unpacked(packed, width, dtype)
    # A compiler fuses this; eager, what lies between is there for some rows at a time.
    found = packed.new_empty(count, width, dtype=dtype)
    for start in range(0, count, step):
        found[start : start + step] = _unpacked(packed[start : start + step], width, dtype)
    return found


def _unpacked(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    codes, scales = packed[:, : width // 2], packed[:, width // 2 :].contiguous().view(torch.float32)
    # No step has a name: it is let go of as soon as the next one has read it.
    pairs, blocks = _pairs(packed.device), (len(packed), -1, BLOCK)
    return (F.embedding(codes.int(), pairs).view(blocks) * scales[..., None]).to(dtype).view(-1, width)


def _pairs(device: torch.device) -> Tensor:
    """The two levels that each byte stands for, [256, 2]."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(len(LEVELS)), levels.repeat(len(LEVELS))], 1)


class PackedProduct(torch.autograd.Function):
    """x·Wᵀ + b of a frozen weight that is packed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed)
        return F.linear(x, unpack(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ unpack(packed, gradient.dtype), None, None


def packed_like(weight: Tensor) -> Tensor:
    """Room for the bytes of a weight, where it is."""
    return weight.new_empty(weight.shape[0], packed_width(weight.shape[1]), dtype=PACKED)
