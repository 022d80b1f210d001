"""Attention by document and, with a window shorter than the document, by block: never over the full square of a row.

For devices and precisions without a variable-length kernel. A block is one call of the fused kernel behind a CPU's
SDPA or, elsewhere (fp32 and fp64 on a GPU), a few plain products over some queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Queries per plain product: only their scores are ever held of the square.
QUERIES_AT_ONCE = 256


class QueryBlock(NamedTuple):
    """``blocks`` blocks of ``size`` queries from ``begin``; the i-th sees keys [keys + i·size, … + reach)."""

    begin: int
    blocks: int
    size: int
    keys: int
    reach: int
    banded: bool  # otherwise causal, with queries and keys the same tokens


class Part(NamedTuple):
    """Views of one block's tensors, [blocks, heads, size, head_dim], and the mask added to its scores."""

    block: QueryBlock
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None  # None: causal


def cut(ends: list[int], window: int | None) -> Iterator[QueryBlock]:
    """Blocks for documents with these cumulative lengths."""
    for start, stop in pairwise(ends):
        length = stop - start
        first = length if window is None else min(window, length)
        yield QueryBlock(start, 1, first, start, first, banded=False)
        if window is None or first == length:
            continue
        # Each later query sees ``window`` keys, so a block of ``window`` queries touches twice as many keys.
        count, rest = divmod(length - window, window)
        if count:
            yield QueryBlock(start + window, count, window, start, 2 * window, banded=True)
        if rest:
            begin = stop - rest
            yield QueryBlock(begin, 1, rest, begin - window, window + rest, banded=True)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: list[int],
    window: int | None,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """From [tokens, heads, head_dim]: the output in the same layout, and ln Σ exp of the scores [heads, tokens]."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    logarithms = query.new_empty(query.shape[1], query.shape[0], dtype=logarithm_dtype(query))
    for part in _parts(query, key, value, ends, window):
        mixed, logarithm = _forward(part, scale, cap)
        _queries(output, part.block).copy_(mixed)
        _columns(logarithms, part.block).copy_(logarithm)
    return output, logarithms


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithms: Tensor,
    ends: list[int],
    window: int | None,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, each laid out by token."""
    queries = torch.empty_like(query, memory_format=torch.contiguous_format)
    # Neighbouring blocks share keys, so their gradients are summed.
    keys, values = (torch.zeros_like(one, memory_format=torch.contiguous_format) for one in (key, value))
    for part in _parts(query, key, value, ends, window):
        block = part.block
        found = _backward(
            part,
            _queries(gradient, block),
            _queries(output, block),
            _columns(logarithms, block).contiguous(),
            scale,
            cap,
        )
        _queries(queries, block).copy_(found[0])
        for total, piece in ((keys, found[1]), (values, found[2])):
            shared = piece.unflatten(1, (key.shape[1], -1)).sum(2) if piece.shape[1] > key.shape[1] else piece
            for number, each in enumerate(shared):
                first = block.keys + number * block.size
                total[first : first + block.reach] += each.transpose(0, 1)
    return queries, keys, values


def on_cpu(query: Tensor) -> bool:
    """Whether a CPU's fused kernel computes a block instead of plain products; it does not support a cap."""
    return query.device.type == "cpu"


def logarithm_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _parts(query: Tensor, key: Tensor, value: Tensor, ends: list[int], window: int | None) -> Iterator[Part]:
    band = (
        None if window is None else _band(window, max(stop - start for start, stop in pairwise(ends)), query)
    )
    shared = query.shape[1] // key.shape[1]
    for block in cut(ends, window):
        keys, values = (_keys(one, block) for one in (key, value))
        if shared > 1:
            # The kernels need a key head per query head; copied for this block alone.
            keys, values = (one.repeat_interleave(shared, dim=1) for one in (keys, values))
        mask = band[: block.size, : block.reach] if block.banded and band is not None else None
        yield Part(block, _queries(query, block), keys, values, mask)


def _band(window: int, longest: int, like: Tensor) -> Tensor | None:
    """The mask of a block's scores [window, 2·window]: key j is visible to query i if i < j ≤ i + window."""
    if longest <= window:
        return None
    size = min(window, longest - window)
    row = torch.arange(size, device=like.device)[:, None]
    column = torch.arange(window + size, device=like.device)
    hidden = (column <= row) | (column > row + window)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _queries(tokens: Tensor, block: QueryBlock) -> Tensor:
    """[tokens, heads, head_dim] → a view [blocks, heads, size, head_dim] of a block's queries."""
    mine = tokens[block.begin : block.begin + block.blocks * block.size]
    return mine.unflatten(0, (block.blocks, block.size)).transpose(1, 2)


def _keys(tokens: Tensor, block: QueryBlock) -> Tensor:
    """The same for its keys; blocks that share keys are views of the same memory."""
    stop = block.keys + (block.blocks - 1) * block.size + block.reach
    return tokens[block.keys : stop].unfold(0, block.reach, block.size).transpose(2, 3)


def _columns(logarithms: Tensor, block: QueryBlock) -> Tensor:
    """[heads, tokens] → a view [blocks, heads, size]."""
    mine = logarithms[:, block.begin : block.begin + block.blocks * block.size]
    return mine.unflatten(1, (block.blocks, block.size)).transpose(0, 1)


def _forward(part: Part, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    return block_forward(part.query, part.key, part.value, part.mask, part.mask is None, scale, cap)


def _backward(
    part: Part, gradient: Tensor, output: Tensor, logarithm: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    mask = part.mask
    return block_backward(
        gradient, part.query, part.key, part.value, output, logarithm, mask, mask is None, scale, cap
    )


def block_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One block [B, heads, size, head_dim]: the result, and ln Σ exp of the scores, to which ``mask`` is added.

    ``cap``: before that, scores are cap · tanh(score / cap).
    """
    if on_cpu(query) and cap is None:
        # Private, but it is what SDPA calls on a CPU, and SDPA does not return the log-sum-exp.
        mixed, logarithm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return mixed, logarithm
    return plain_forward(query, key, value, mask, causal, scale, cap)


def block_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithm: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. Output and log-sum-exp may cover more keys than the block has."""
    if on_cpu(query) and cap is None:
        queries, keys, values = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(gradient, query, key, value, output, logarithm, 0.0, causal), attn_mask=mask, scale=scale
        )
        return queries, keys, values
    return plain_backward(gradient, query, key, value, output, logarithm, mask, causal, scale, cap)


def plain_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Like the fused kernel: the output, and ln Σ exp of each query's scores."""
    mixed, logarithms = [], []
    for first in range(0, query.shape[2], QUERIES_AT_ONCE):
        scores, _ = _scores(query, key, mask, causal, scale, cap, first)
        logarithm = scores.logsumexp(-1)
        logarithms.append(logarithm)
        weights = scores.sub_(logarithm[..., None]).exp_()
        mixed.append(weights.to(value.dtype) @ value[:, :, : scores.shape[-1]])
    return torch.cat(mixed, 2), torch.cat(logarithms, 2)


def plain_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithm: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Recomputes the attention weights from the scores and their log-sum-exp."""
    queries, keys, values = (torch.zeros_like(one) for one in (query, key, value))
    for first in range(0, query.shape[2], QUERIES_AT_ONCE):
        rows = slice(first, first + QUERIES_AT_ONCE)
        scores, capped = _scores(query, key, mask, causal, scale, cap, first)
        seen = slice(0, scores.shape[-1])
        weights = scores.sub_(logarithm[:, :, rows, None]).exp_().to(value.dtype)
        mine = gradient[:, :, rows]
        values[:, :, seen] += weights.transpose(2, 3) @ mine
        inner = (mine * output[:, :, rows]).sum(-1, keepdim=True)
        change = (mine @ value[:, :, seen].transpose(2, 3)).sub_(inner).mul_(weights).mul_(scale)
        if capped is not None:
            change.mul_(capped.square_().neg_().add_(1))
        queries[:, :, rows] = change @ key[:, :, seen]
        keys[:, :, seen] += change.transpose(2, 3) @ query[:, :, rows]
    return queries, keys, values


def _scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    cap: float | None,
    first: int,
) -> tuple[Tensor, Tensor | None]:
    """Scores of some queries from ``first`` on; if causal, with the keys up to the last of them.

    With a cap, also tanh(score / cap), which its gradient needs: times 1 − tanh².
    """
    some = query[:, :, first : first + QUERIES_AT_ONCE]
    count = some.shape[2]
    seen = first + count if causal else key.shape[2]
    scores = (some @ key[:, :, :seen].transpose(2, 3)).to(logarithm_dtype(query)).mul_(scale)
    capped = None
    if cap is not None:
        capped = scores.div_(cap).tanh_()
        scores = capped * cap
    if mask is not None:
        return scores.add_(mask[first : first + count]), capped
    if not causal:
        return scores, capped
    future = torch.ones(count, seen, dtype=torch.bool, device=query.device).triu_(first + 1)
    return scores.masked_fill_(future, -torch.inf), capped
