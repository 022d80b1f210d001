"""A fused kernel for a chunk's loss and its logits' gradients, for GPUs with the whole vocabulary on one rank.

The compiler's two passes read the logits from memory two or three times and write them once. Here one program handles
a row: it computes the row's normaliser, then turns the row into its gradients from the end to the beginning, so that
what it read last is still in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.facts.targets import IGNORE
from shoal.models.in_triton import in_triton

# Columns per iteration of a program, and its warps: the fastest on an H200 (``benchmarks/loss.py``). Fewer programs
# that loop over rows, so that all active rows fit into the cache, were slower.
BLOCK, WARPS = 4096, 8

# Takes logits, targets, factor and z; returns each token's normaliser and its target's logit.
Whole = Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def kernel() -> Whole | None:
    """The kernel, or None without Triton."""
    return in_triton(_compiled)


def _compiled(triton: Any, tl: Any) -> Whole:
    @triton.jit
    def turn_row(
        logits,
        targets,
        normalisers,
        of_targets,
        stride,
        columns,
        factor,
        twice_z,
        ignore: tl.constexpr,
        block: tl.constexpr,
    ):
        here = logits + tl.program_id(0).to(tl.int64) * stride
        lanes = tl.arange(0, block)
        blocks = tl.cdiv(columns, block)
        largest = -float("inf")
        total = 0.0
        for number in range(0, blocks):
            at = number * block + lanes
            wide = tl.load(here + at, at < columns, -float("inf")).to(tl.float32)
            higher = tl.maximum(largest, tl.max(wide))
            total = total * tl.exp(largest - higher) + tl.sum(tl.exp(wide - higher))
            largest = higher
        normaliser = tl.log(total) + largest
        target = tl.load(targets + tl.program_id(0))
        counts = target != ignore
        tl.store(normalisers + tl.program_id(0), normaliser)
        tl.store(of_targets + tl.program_id(0), tl.load(here + target, counts, 0.0).to(tl.float32))
        scale = tl.where(counts, factor, 0.0)
        risen = 1.0 + twice_z * normaliser
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        for number in range(0, blocks):
            at = (blocks - 1 - number) * block + lanes
            wide = tl.load(here + at, at < columns, -float("inf")).to(tl.float32)
            softmax = tl.exp(wide - normaliser) * risen
            gradient = tl.where(at == target, softmax - 1.0, softmax) * scale
            tl.store(here + at, gradient.to(logits.dtype.element_ty), at < columns)

    def whole(
        logits: Tensor,
        targets: Tensor,
        factor: float,
        z: float,
        block: int = BLOCK,
        warps: int = WARPS,
    ) -> tuple[Tensor, Tensor]:
        tokens, columns = logits.shape
        found = torch.empty(2, tokens, dtype=torch.float32, device=logits.device)
        turn_row[(tokens,)](
            *(logits, targets, found[0], found[1], logits.stride(0), columns, factor, 2.0 * z),
            ignore=IGNORE,
            block=block,
            num_warps=warps,
        )
        return found[0], found[1]

    return whole
