"""NF4 weights (``facts/nf4.py``): packed once, unpacked at every use, in both passes.

Unpacked weights are never saved: autograd would keep them until the backward pass and lose the memory that packing
saves. So a product is an autograd function of its own, which saves the packed bytes and unpacks them again for the
input gradient. The compiler must not see that both unpack the same bytes: it would do it once, in the forward pass,
and keep the result for all blocks (5 GiB of an 8B model, and more). So unpacking is an operator that also takes the
tensor to be multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.facts.nf4 import AT_ONCE, BLOCK, LEVELS, packed_width, unpacked_width
from shoal.models.in_triton import in_triton

PACKED = torch.uint8
# Bytes that one program of the kernel unpacks.
PART = 1024


def pack(rows: Tensor) -> Tensor:
    """Pack rows of whole blocks into bytes: the nearest level, and on a tie the lower one."""
    count, width = rows.shape
    blocks = rows.to(torch.float32).view(count, width // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1)
    levels = torch.tensor(LEVELS, device=rows.device)
    # A block of zeros has scale zero; its values are the level of zero.
    shares = blocks / torch.where(scales > 0, scales, 1.0)[..., None]
    codes = torch.bucketize(shares, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(PACKED)
    first, second = codes.view(count, width // 2, 2).unbind(-1)
    return torch.cat([first << 4 | second, scales.view(PACKED)], 1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, bytes] → [rows, values], level times scale in fp32."""
    width, kernel = unpacked_width(packed.shape[1]), in_triton(_compiled) if packed.is_cuda else None
    found = packed.new_empty(len(packed), width, dtype=dtype)
    if kernel is not None:
        kernel(packed, found, torch.tensor(LEVELS, device=packed.device))
        return found
    # A few rows at a time, to bound the temporaries.
    step = max(1, AT_ONCE // width)
    for start in range(0, len(packed), step):
        found[start : start + step] = _unpacked(packed[start : start + step], width, dtype)
    return found


def _unpacked(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    codes, scales = packed[:, : width // 2], packed[:, width // 2 :].contiguous().view(torch.float32)
    # No temporary is named, so each is freed as soon as the next one has been computed.
    pairs, blocks = _pairs(packed.device), (len(packed), -1, BLOCK)
    return (F.embedding(codes.int(), pairs).view(blocks) * scales[..., None]).to(dtype).view(-1, width)


def _pairs(device: torch.device) -> Tensor:
    """The two levels that each byte encodes, [256, 2]."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(len(LEVELS)), levels.repeat(len(LEVELS))], 1)


def _compiled(triton: Any, tl: Any) -> Callable[[Tensor, Tensor, Tensor], None]:
    @triton.jit
    def unpack_part(
        packed, found, levels, half, length: tl.constexpr, part: tl.constexpr, block: tl.constexpr
    ):
        row = packed + tl.program_id(0).to(tl.int64) * length
        at = tl.program_id(1) * part + tl.arange(0, part)
        here = at < half
        codes = tl.load(row + at, here, other=0).to(tl.int32)
        scales = (row + half).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + at // (block // 2), here, other=0.0)
        first = tl.load(levels + (codes >> 4)) * scale
        second = tl.load(levels + (codes & 15)) * scale
        pairs = tl.program_id(1) * part * 2 + tl.arange(0, part * 2)
        values = tl.interleave(first, second).to(found.dtype.element_ty)
        tl.store(found + tl.program_id(0).to(tl.int64) * half * 2 + pairs, values, pairs < half * 2)

    def run(packed: Tensor, found: Tensor, levels: Tensor) -> None:
        half = found.shape[1] // 2
        grid = len(packed), triton.cdiv(half, PART)
        unpack_part[grid](packed.contiguous(), found, levels, half, packed.shape[1], PART, BLOCK)

    return run


@torch.library.custom_op("shoal::unpacked_beside", mutates_args=())
def unpacked_beside(packed: Tensor, beside: Tensor) -> Tensor:
    """Like ``unpack``, in the dtype of the tensor it will be multiplied with, and only once that exists."""
    return unpack(packed, beside.dtype)


@unpacked_beside.register_fake
def _shape_alone(packed: Tensor, beside: Tensor) -> Tensor:
    return packed.new_empty(packed.shape[0], unpacked_width(packed.shape[1]), dtype=beside.dtype)


class PackedProduct(torch.autograd.Function):
    """x·Wᵀ + b with a packed, frozen weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed)
        return F.linear(x, unpacked_beside(packed, x), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ unpacked_beside(packed, gradient), None, None


def packed_like(weight: Tensor) -> Tensor:
    """An empty tensor for a weight's packed bytes, or for a stack of them, on the same device."""
    return weight.new_empty(*weight.shape[:-1], packed_width(weight.shape[-1]), dtype=PACKED)
