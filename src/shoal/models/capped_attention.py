"""Attention whose scores are capped, cap · tanh(score / cap), in 16 bits on a GPU: kernels of our own.

No kernel of torch's computes it but flex attention's, which is differentiated by autograd alone. Inside of an operator
(``models/varlen.py``) that would mean to repeat the forward pass for the backward one. These take and give what
FlashAttention's do: the result with its logarithms, gradients from these. A token sees the keys from ``low`` to itself,
and is seen by queries from itself to before ``high``: so documents and windows are two numbers for each token, and
blocks that nobody sees are never computed. Nothing is added up in an order that could change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.models.in_triton import in_triton

WIDEST_HEAD = 256


class Bounds(NamedTuple):
    """Of each token: the first key that it sees, and the end of the queries that see it. int32 [tokens], ascending."""

    low: Tensor
    high: Tensor


class BlockSizes(NamedTuple):
    """Queries and keys that a program takes at a time, and how it runs."""

    queries: int
    keys: int
    warps: int
    stages: int


class CappedKernels(NamedTuple):
    forward: Callable[..., None]
    queries_backward: Callable[..., None]  # also leaves each query's Σ result · gradient
    keys_backward: Callable[..., None]


def fits(query: Tensor) -> bool:
    """Whether the kernels compute this; else it is plain products, block by block."""
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    if not query.is_cuda or not narrow or query.shape[-1] > WIDEST_HEAD:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0) and in_triton(_compiled) is not None


def bounds(tokens: int, ends: Tensor | None, length: int, window: int | None, device: torch.device) -> Bounds:
    """``ends``: see ``Documents``; None: every ``length`` tokens are one document. Waits for no device."""
    place = torch.arange(tokens, dtype=torch.int32, device=device)
    if ends is None:
        low = place - place % length
        high = low + length
    else:
        after = torch.searchsorted(ends, place, right=True)
        low, high = ends[after - 1], ends[after]
    if window is not None:
        low, high = torch.maximum(low, place - (window - 1)), torch.minimum(high, place + window)
    return Bounds(low, high)


def forward(
    query: Tensor, key: Tensor, value: Tensor, seen: Bounds, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Of [tokens, heads, head_dim], contiguous: the result, and ln Σ exp of the scores [heads, tokens]."""
    tokens, heads, width = query.shape
    output = torch.empty_like(query)
    logarithms = query.new_empty(heads, tokens, dtype=torch.float32)
    blocks = _blocks(width, backward=False)
    _kernels().forward[_grid(tokens, blocks.queries, heads)](
        *(query, key, value, output, logarithms, seen.low, tokens, scale / cap, cap),
        *_sizes(query, key, blocks),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return output, logarithms


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithms: Tensor,
    seen: Bounds,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    tokens, heads, width = query.shape
    gradient = gradient.contiguous()
    queries, keys, values = (torch.empty_like(one) for one in (query, key, value))
    inner = torch.empty_like(logarithms)
    blocks = _blocks(width, backward=True)
    sizes = _sizes(query, key, blocks)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    _kernels().queries_backward[_grid(tokens, blocks.queries, heads)](
        *(query, key, value, output, gradient, logarithms, inner, queries, seen.low, tokens),
        *(scale / cap, cap, scale, *sizes),
        **options,
    )
    _kernels().keys_backward[_grid(tokens, blocks.keys, key.shape[1])](
        *(query, key, value, gradient, logarithms, inner, keys, values, seen.low, seen.high, tokens),
        *(scale / cap, cap, scale, *sizes),
        **options,
    )
    return queries, keys, values


def _grid(tokens: int, block: int, heads: int) -> tuple[int, int]:
    return -(-tokens // block), heads


def _sizes(query: Tensor, key: Tensor, blocks: BlockSizes) -> tuple[int, ...]:
    """Heads, how many of them share keys, the width of one, and as a power of two; queries and keys at a time."""
    _, heads, width = query.shape
    padded = max(16, 1 << (width - 1).bit_length())
    return heads, heads // key.shape[1], width, padded, blocks.queries, blocks.keys


def _blocks(width: int, backward: bool) -> BlockSizes:
    """Of those tried on an H200 the fastest (``benchmarks/attention.py``)."""
    if backward:
        return BlockSizes(64, 64, 8, 1) if width > 128 else BlockSizes(64, 64, 4, 2)
    return BlockSizes(128, 64, 8, 2) if width > 128 else BlockSizes(128, 64, 4, 3)


def _kernels() -> Any:
    found = in_triton(_compiled)
    assert found is not None
    return found


def _compiled(triton: Any, tl: Any) -> CappedKernels:
    log2_e = tl.constexpr(1.4426950408889634)

    @triton.jit
    def scores(query, keys, rows, columns, low, inner_scale, cap):
        """Of a block: tanh of its products, the scores in powers of two, and which of them are visible."""
        products = tl.dot(query, tl.trans(keys)) * inner_scale
        bent = 1 - 2 / (tl.exp2(products * (2 * log2_e)) + 1)
        visible = (columns[None, :] <= rows[:, None]) & (columns[None, :] >= low[:, None])
        return bent, bent * (cap * log2_e), visible

    @triton.jit
    def tile(start, rows, tokens, stride, width: tl.constexpr, padded: tl.constexpr):
        """Where some tokens' features of one head are, and which of them there are."""
        features = tl.arange(0, padded)
        places = start + rows.to(tl.int64)[:, None] * stride + features[None, :]
        return places, (rows[:, None] < tokens) & (features[None, :] < width)

    @triton.jit
    def forward_block(
        queries,
        keys,
        values,
        results,
        logarithms,
        lows,
        tokens,
        inner_scale,
        cap,
        heads: tl.constexpr,
        shared: tl.constexpr,
        width: tl.constexpr,
        padded: tl.constexpr,
        at_once: tl.constexpr,
        keys_at_once: tl.constexpr,
    ):
        # The last ones first: they see the most.
        block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
        rows = block * at_once + tl.arange(0, at_once)
        own, there = tile(head * width, rows, tokens, heads * width, width, padded)
        query = tl.load(queries + own, there, 0.0)
        low = tl.load(lows + rows, rows < tokens, tokens)
        most = tl.full([at_once], -1e30, tl.float32)
        total = tl.zeros([at_once], tl.float32)
        mixed = tl.zeros([at_once, padded], tl.float32)
        begin = tl.load(lows + block * at_once) // keys_at_once * keys_at_once
        for first in range(begin, tl.minimum((block + 1) * at_once, tokens), keys_at_once):
            columns = first + tl.arange(0, keys_at_once)
            theirs, known = tile(
                head // shared * width, columns, tokens, heads // shared * width, width, padded
            )
            key = tl.load(keys + theirs, known, 0.0)
            _, score, visible = scores(query, key, rows, columns, low, inner_scale, cap)
            higher = tl.maximum(most, tl.max(tl.where(visible, score, -1e30), 1))
            weight = tl.where(visible, tl.exp2(score - higher[:, None]), 0.0)
            kept = tl.exp2(most - higher)
            total = total * kept + tl.sum(weight, 1)
            value = tl.load(values + theirs, known, 0.0)
            mixed = mixed * kept[:, None] + tl.dot(weight.to(value.dtype), value)
            most = higher
        tl.store(results + own, (mixed / total[:, None]).to(results.dtype.element_ty), there)
        found = (most + tl.log2(total)) / log2_e
        tl.store(logarithms + head.to(tl.int64) * tokens + rows, found, rows < tokens)

    @triton.jit
    def queries_block(
        queries,
        keys,
        values,
        results,
        gradients,
        logarithms,
        inners,
        changes,
        lows,
        tokens,
        inner_scale,
        cap,
        scale,
        heads: tl.constexpr,
        shared: tl.constexpr,
        width: tl.constexpr,
        padded: tl.constexpr,
        at_once: tl.constexpr,
        keys_at_once: tl.constexpr,
    ):
        block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
        rows = block * at_once + tl.arange(0, at_once)
        own, there = tile(head * width, rows, tokens, heads * width, width, padded)
        query = tl.load(queries + own, there, 0.0)
        gradient = tl.load(gradients + own, there, 0.0)
        result = tl.load(results + own, there, 0.0)
        inner = tl.sum(result.to(tl.float32) * gradient.to(tl.float32), 1)
        of_rows = head.to(tl.int64) * tokens + rows
        tl.store(inners + of_rows, inner, rows < tokens)
        logarithm = tl.load(logarithms + of_rows, rows < tokens, 0.0) * log2_e
        low = tl.load(lows + rows, rows < tokens, tokens)
        change = tl.zeros([at_once, padded], tl.float32)
        begin = tl.load(lows + block * at_once) // keys_at_once * keys_at_once
        for first in range(begin, tl.minimum((block + 1) * at_once, tokens), keys_at_once):
            columns = first + tl.arange(0, keys_at_once)
            theirs, known = tile(
                head // shared * width, columns, tokens, heads // shared * width, width, padded
            )
            key = tl.load(keys + theirs, known, 0.0)
            bent, score, visible = scores(query, key, rows, columns, low, inner_scale, cap)
            weight = tl.where(visible, tl.exp2(score - logarithm[:, None]), 0.0)
            value = tl.load(values + theirs, known, 0.0)
            back = tl.dot(gradient, tl.trans(value)) - inner[:, None]
            back = weight * back * (1 - bent * bent)
            change += tl.dot(back.to(key.dtype), key)
        tl.store(changes + own, (change * scale).to(changes.dtype.element_ty), there)

    @triton.jit
    def keys_block(
        queries,
        keys,
        values,
        gradients,
        logarithms,
        inners,
        key_changes,
        value_changes,
        lows,
        highs,
        tokens,
        inner_scale,
        cap,
        scale,
        heads: tl.constexpr,
        shared: tl.constexpr,
        width: tl.constexpr,
        padded: tl.constexpr,
        at_once: tl.constexpr,
        keys_at_once: tl.constexpr,
    ):
        block, key_head = tl.program_id(0), tl.program_id(1)
        columns = block * keys_at_once + tl.arange(0, keys_at_once)
        theirs, known = tile(key_head * width, columns, tokens, heads // shared * width, width, padded)
        key, value = tl.load(keys + theirs, known, 0.0), tl.load(values + theirs, known, 0.0)
        key_change = tl.zeros([keys_at_once, padded], tl.float32)
        value_change = tl.zeros([keys_at_once, padded], tl.float32)
        begin = block * keys_at_once // at_once * at_once
        end = tl.load(highs + tl.minimum((block + 1) * keys_at_once, tokens) - 1)
        for number in range(shared):
            head = key_head * shared + number
            for first in range(begin, end, at_once):
                rows = first + tl.arange(0, at_once)
                own, there = tile(head * width, rows, tokens, heads * width, width, padded)
                query = tl.load(queries + own, there, 0.0)
                low = tl.load(lows + rows, rows < tokens, tokens)
                bent, score, visible = scores(query, key, rows, columns, low, inner_scale, cap)
                of_rows = head.to(tl.int64) * tokens + rows
                logarithm = tl.load(logarithms + of_rows, rows < tokens, 0.0) * log2_e
                weight = tl.where(visible, tl.exp2(score - logarithm[:, None]), 0.0)
                gradient = tl.load(gradients + own, there, 0.0)
                value_change += tl.dot(tl.trans(weight.to(gradient.dtype)), gradient)
                inner = tl.load(inners + of_rows, rows < tokens, 0.0)
                back = tl.dot(gradient, tl.trans(value)) - inner[:, None]
                back = weight * back * (1 - bent * bent)
                key_change += tl.dot(tl.trans(back.to(query.dtype)), query)
        tl.store(key_changes + theirs, (key_change * scale).to(key_changes.dtype.element_ty), known)
        tl.store(value_changes + theirs, value_change.to(value_changes.dtype.element_ty), known)

    return CappedKernels(forward_block, queries_block, keys_block)
