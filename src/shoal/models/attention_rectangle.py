"""Attention over one rectangle of queries and keys, with the log-sum-exp of the scores for merging partial results.

The only place that knows which kernels return it: FlashAttention on CUDA in 16 bits, the fused kernel of a CPU, and
plain products everywhere else (``attention_blocks``). Tensors are [B, tokens, heads, head_dim].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.facts.layout.ring_blocks import Rectangle
from shoal.models.attention_blocks import QUERIES_AT_ONCE, block_backward, block_forward
from shoal.models.varlen import flash_kernel


def forward(
    query: Tensor, key: Tensor, value: Tensor, seen: Rectangle, scale: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The output [B, queries, heads, head_dim] and the log-sum-exp [B, heads, queries]."""
    if cap is None and flash_kernel(query):
        output, logarithms, *_ = torch.ops.aten._flash_attention_forward(
            *(query, key, value, None, None, query.shape[1], key.shape[1], 0.0, seen.causal),
            return_debug_mask=False,
            scale=scale,
            **_reach(seen),
        )
        return output, logarithms
    mixed, logarithms = [], []
    for rows, keys, mask in _blocks(query, seen):
        heads, read = (_shared(query, one[:, keys]) for one in (key, value))
        found = block_forward(_by_head(query[:, rows]), heads, read, mask, seen.causal, scale, cap)
        mixed.append(found[0].transpose(1, 2))
        logarithms.append(found[1])
    return torch.cat(mixed, 1), torch.cat(logarithms, 2)


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithms: Tensor,
    seen: Rectangle,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of these queries, keys and values, where ``output`` and ``logarithms`` are those over all keys."""
    if cap is None and flash_kernel(query):
        # Without dropout no random state is read, but the kernel requires one of this type.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty(0, device=query.device)
        found = torch.ops.aten._flash_attention_backward(
            *(gradient, query, key, value, output, logarithms.contiguous(), None, None),
            *(query.shape[1], key.shape[1], 0.0, seen.causal, state, unused),
            scale=scale,
            **_reach(seen),
        )
        return found[0], found[1], found[2]
    queries, keys, values = (torch.zeros_like(one) for one in (query, key, value))
    for rows, some, mask in _blocks(query, seen):
        change, asked, result = (_by_head(one[:, rows]) for one in (gradient, query, output))
        heads, read = (_shared(query, one[:, some]) for one in (key, value))
        logarithm = logarithms[:, :, rows].contiguous()
        found = block_backward(change, asked, heads, read, result, logarithm, mask, seen.causal, scale, cap)
        queries[:, rows] = found[0].transpose(1, 2)
        for total, piece in ((keys, found[1]), (values, found[2])):
            total[:, some] += _summed(piece, key.shape[2]).transpose(1, 2)
    return queries, keys, values


def _reach(seen: Rectangle) -> dict[str, int]:
    """The kernel's window to the left and right; the kernel aligns the last query with the last key."""
    if seen.window is None:
        return {"window_size_left": -1, "window_size_right": 0 if seen.causal else -1}
    queries, keys = seen.end - seen.begin, seen.keys_end - seen.keys_begin
    left = keys - queries - seen.distance + seen.window - 1
    return {"window_size_left": left, "window_size_right": 0 if seen.distance == 0 else -1}


def _blocks(query: Tensor, seen: Rectangle) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, keys, and the mask added to their scores. A band is cut into blocks, so no mask is a full square."""
    queries, keys = seen.end - seen.begin, seen.keys_end - seen.keys_begin
    if seen.window is None:
        yield slice(0, queries), slice(0, keys), None
        return
    for first in range(0, queries, QUERIES_AT_ONCE):
        last = min(first + QUERIES_AT_ONCE, queries)
        begin = max(0, seen.distance + first - seen.window + 1)
        end = min(keys, seen.distance + last)
        yield slice(first, last), slice(begin, end), _band(query, seen, first, last, begin, end)


def _band(query: Tensor, seen: Rectangle, first: int, last: int, begin: int, end: int) -> Tensor:
    row = torch.arange(first, last, device=query.device)[:, None] + seen.distance
    column = torch.arange(begin, end, device=query.device)
    assert seen.window is not None
    hidden = (column > row) | (column <= row - seen.window)
    return query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _by_head(tokens: Tensor) -> Tensor:
    return tokens.transpose(1, 2)


def _shared(query: Tensor, tokens: Tensor) -> Tensor:
    """Repeat key heads to match query heads, as these kernels require; copied for one block at a time."""
    times = query.shape[2] // tokens.shape[2]
    return _by_head(tokens if times == 1 else tokens.repeat_interleave(times, dim=2))


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Sum gradients over the query heads that share a key head: [B, heads, tokens, head_dim]."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def merge(total: Tensor, logarithms: Tensor, part: Tensor, more: Tensor) -> None:
    """Add a part [B, tokens, heads, head_dim] to a result in place, each weighted by its share of the total Σ exp."""
    together = torch.logaddexp(logarithms, more)
    old, new = ((one - together).exp_().transpose(1, 2)[..., None] for one in (logarithms, more))
    total.mul_(old).add_(part * new)
    logarithms.copy_(together)
