"""The squares of many gradients, summed by one kernel on a GPU.

torch's norm of a list needs one launch per 300 MB and reaches half of the memory bandwidth: on an H200 2.4 ms for 2.7
billion gradients in bf16; this kernel takes 1.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.models.in_triton import in_triton
from shoal.train.adamw_kernel import EVEN, sent

# Elements per program at a time, how often, and its warps: the best of five measured settings.
BLOCK, ROUNDS, WARPS = 2048, 16, 4
CHUNK = BLOCK * ROUNDS

Squares = Callable[[Sequence[Tensor]], Tensor]


def summed_squares(gradients: Sequence[Tensor]) -> Tensor | None:
    """The sum in fp64, on their device; None if the kernel does not support them. Each program sums in fp32."""
    taken = all(one.is_cuda and one.dtype != torch.float64 and one.is_contiguous() for one in gradients)
    kernel = in_triton(_compiled) if taken else None
    if kernel is None:
        return None
    kinds = dict.fromkeys(one.dtype for one in gradients)
    return torch.stack([kernel([one for one in gradients if one.dtype == kind]) for kind in kinds]).sum()


def table(gradients: Sequence[Tensor]) -> tuple[list[list[int]], list[int]]:
    """For each gradient its address, its size and its first chunk; and for every chunk the gradient it belongs to."""
    rows: list[list[int]] = []
    owners: list[int] = []
    for one in gradients:
        if one.numel():
            owners += [len(rows)] * -(-one.numel() // CHUNK)
            rows.append([one.data_ptr(), one.numel(), len(owners) - -(-one.numel() // CHUNK)])
    return rows, owners


def _compiled(triton: Any, tl: Any) -> Squares:
    @triton.jit
    def square_chunk(
        rows, owners, like, partial, even: tl.constexpr, block: tl.constexpr, rounds: tl.constexpr
    ):
        chunk = tl.program_id(0)
        row = rows + tl.load(owners + chunk) * 3
        gradient = tl.load(row).to(like.dtype)
        size = tl.load(row + 1)
        if even:
            gradient = tl.multiple_of(gradient, 16)
            size = tl.multiple_of(size, 16)
        first = (chunk - tl.load(row + 2)) * block * rounds
        total = tl.zeros((block,), tl.float32)
        for number in range(rounds):
            at = first + number * block + tl.arange(0, block)
            value = tl.load(gradient + at, at < size, 0.0).to(tl.float32)
            total += value * value
        tl.store(partial + chunk, tl.sum(total, 0))

    def squares(gradients: Sequence[Tensor]) -> Tensor:
        rows, owners = table(gradients)
        device, kind = gradients[0].device, gradients[0].dtype
        if not owners:
            return torch.zeros((), dtype=torch.float64, device=device)
        partial = torch.empty(len(owners), dtype=torch.float32, device=device)
        even = not any(address % EVEN or size % EVEN for address, size, _ in rows)
        like = torch.empty(0, dtype=kind, device=device)
        square_chunk[(len(owners),)](
            sent(rows, device), sent(owners, device), like, partial, even, BLOCK, ROUNDS, num_warps=WARPS
        )
        return partial.double().sum()

    return squares
