"""Scatter token copies to expert order, and gather and sum the experts' outputs back per token.

Custom operators. Compiled together with the norm before or after, the sum would run twice, which on an H200 takes 0.30
ms for 16,384 tokens of four experts and 2,048 features, against 0.09 and 0.06 ms one after the other; and copies would
be gathered, reading each token once per copy, in 0.14 ms instead of 0.08.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.models.in_triton import in_triton

WARPS = 4

MixKernel = Callable[[Tensor, Tensor, int, Tensor | None], Tensor]
SpreadKernel = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@torch.library.custom_op("shoal::mix", mutates_args=())
def mix_rows(results: Tensor, back: Tensor, copies: int, weights: Tensor | None = None) -> Tensor:
    """Sum per token: [T, width] from results [T·copies, width] in any order; ``back`` has each copy's position.

    There may be fewer results: a missing one has a position past the end in ``back`` and adds nothing. ``weights``:
    [T, copies]; None: all 1.
    """
    kernel = in_triton(_compiled) if results.is_cuda and results.dtype != torch.float64 else None
    if kernel is not None:
        return kernel(results, back, copies, weights)
    if (there := results.shape[0]) < back.shape[0]:
        results, back = torch.cat([results, results.new_zeros(1, results.shape[1])]), back.clamp(max=there)
    apart = results.index_select(0, back).unflatten(0, (-1, copies))
    return (apart if weights is None else apart.mul_(weights[..., None])).sum(1)


@mix_rows.register_fake
def _empty(results: Tensor, back: Tensor, copies: int, weights: Tensor | None = None) -> Tensor:
    return results.new_empty(back.shape[0] // copies, results.shape[1])


@torch.library.custom_op("shoal::spread", mutates_args=())
def spread_rows(x: Tensor, place: Tensor, back: Tensor, copies: int) -> Tensor:
    """``copies`` copies of every token of x [T, width], each at its position in ``back`` [T·copies]; ``place`` is the
    inverse.

    There may be fewer places: a dropped copy has a position past the end in ``back``.
    """
    kernel = in_triton(_spreading) if x.is_cuda else None
    if kernel is not None:
        return kernel(x, place, back, copies)
    return x.index_select(0, place // copies)


@spread_rows.register_fake
def _unwritten(x: Tensor, place: Tensor, back: Tensor, copies: int) -> Tensor:
    return x.new_empty(place.shape[0], x.shape[1])


def _spreading(triton: Any, tl: Any) -> SpreadKernel:
    @triton.jit
    def spread_token(x, back, spread, there, width, copies: tl.constexpr, features: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        feature = tl.arange(0, features)
        here = feature < width
        values = tl.load(x + token * width + feature, here)
        for number in range(copies):
            row = tl.load(back + token * copies + number)
            tl.store(spread + row * width + feature, values, here & (row < there))

    def run(x: Tensor, place: Tensor, back: Tensor, copies: int) -> Tensor:
        width, features = x.shape[1], triton.next_power_of_2(x.shape[1])
        spread = _unwritten(x, place, back, copies)
        if spread.numel():
            spread_token[(x.shape[0],)](
                x.contiguous(), back, spread, spread.shape[0], width, copies, features, num_warps=WARPS
            )
        return spread

    return run


def _compiled(triton: Any, tl: Any) -> MixKernel:
    @triton.jit
    def mix_token(
        results,
        weights,
        back,
        mixed,
        there,
        width,
        copies: tl.constexpr,
        features: tl.constexpr,
        weighted: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        feature = tl.arange(0, features)
        here = feature < width
        total = tl.zeros((features,), tl.float32)
        for number in range(copies):
            row = tl.load(back + token * copies + number)
            values = tl.load(results + row * width + feature, here & (row < there), 0.0).to(tl.float32)
            if weighted:
                values *= tl.load(weights + token * copies + number).to(tl.float32)
            total += values
        tl.store(mixed + token * width + feature, total.to(mixed.dtype.element_ty), here)

    def run(results: Tensor, back: Tensor, copies: int, weights: Tensor | None) -> Tensor:
        width, features = results.shape[1], triton.next_power_of_2(results.shape[1])
        mixed = results.new_empty(back.shape[0] // copies, width)
        weighted = weights is not None
        weights = weights.contiguous() if weights is not None else results
        if mixed.numel():
            mix_token[(mixed.shape[0],)](
                results.contiguous(), weights, back, mixed, results.shape[0], width, copies, features, weighted,
                num_warps=WARPS,
            )  # fmt: skip
        return mixed

    return run
