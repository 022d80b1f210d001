"""Variable-length attention: causal within documents and windows, as one operator that saves no mask and no scores.

A custom operator around torch's kernels instead of ``torch.nn.attention.varlen``, for three reasons. That function
takes the number of documents and the longest one as a shape and a number, so a compiled block would be recompiled for
each batch; here they are read from a host tensor, which no compiler inspects. In torch 2.11 it does not expose shared
key/value heads, which its kernel supports. And it has no kernel for CPUs and wide precisions: this operator saves the
same tensors everywhere, so a dry run shows what a GPU would hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.models import attention_blocks
from shoal.models.documents import Documents, listed_ends


def attend_within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None,
    window: int | None,
    scale: float,
    cap: float | None = None,
) -> Tensor:
    """Softmax attention over [B, heads, T, head_dim]: causal by index, within the document and the window.

    ``cap``: see ``attend``.
    """
    rows, _, length, _ = query.shape
    # By token: a projection's own layout, and the one that variable-length kernels read. A single row, which flattens
    # to a view, is copied too: the kernel's output has the layout of the queries, and the next projection reads by
    # token.
    flat = (heads.transpose(1, 2).flatten(0, 1).contiguous() for heads in (query, key, value))
    ends, sizes = (None, None) if documents is None else (documents.ends, documents.sizes)
    mixed, _ = _attend(*flat, ends, sizes, length, window, scale, cap)
    output: Tensor = mixed.unflatten(0, (rows, length)).transpose(1, 2)
    return output


def flash_kernel(query: Tensor) -> bool:
    """Whether FlashAttention's variable-length kernel computes this; otherwise it runs block by block.

    Per layer on an H200 (4 × 4096 tokens, 32/8 heads of 64, forward and backward): with documents of 700 tokens it
    takes 1.30 ms, flex attention 1.52 and a dense mask 7.5. It supports windows, so flex attention (1.82 ms at a
    window of 1,024; its mask 1.9 to 7.6 ms per batch; no backward on CPUs or in fp64) would be a redundant second
    path. ``benchmarks/attention.py`` compares them. The kernel needs 16 bits, head sizes that are multiples of 8 up to
    256, and CUDA (on AMD its log-sum-exp has another layout).
    """
    head_dim = query.shape[-1]
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    if not query.is_cuda or torch.version.hip is not None or not narrow or head_dim % 8:
        return False
    # Since Ampere; the largest heads need the shared memory of data-centre chips.
    capability = torch.cuda.get_device_capability(query.device)
    return capability >= (8, 0) and head_dim <= (256 if capability in ((8, 0), (9, 0)) else 192)


@torch.library.custom_op("shoal::attend_within", mutates_args=())
def _attend(
    query: Tensor,  # [tokens, heads, head_dim]
    key: Tensor,
    value: Tensor,
    ends: Tensor | None,  # see Documents; None: rows are one document each
    sizes: Tensor | None,
    length: int,  # of a row
    window: int | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """The output, in the queries' layout, and ln Σ exp of the scores, [heads, tokens]."""
    if cap is not None or not flash_kernel(query):
        return attention_blocks.forward(
            query, key, value, _host_ends(query, ends, sizes, length), window, scale, cap
        )
    lengths, longest = _device_ends(query, ends, sizes, length)
    # Private, like the backward kernel below: what torch.nn.attention.varlen calls itself, unchanged from 2.11 to
    # 2.13.
    output, logarithms, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, lengths, lengths, longest, longest, 0.0, window is None),
        return_debug_mask=False,
        scale=scale,
        **_reach(window),
    )
    return output, logarithms


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor | None,
    sizes: Tensor | None,
    length: int,
    window: int | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    logarithms = query.new_empty(
        query.shape[1], query.shape[0], dtype=attention_blocks.logarithm_dtype(query)
    )
    return torch.empty_like(query, memory_format=torch.contiguous_format), logarithms


@torch.library.custom_op("shoal::attend_within_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithms: Tensor,
    ends: Tensor | None,
    sizes: Tensor | None,
    length: int,
    window: int | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if cap is not None or not flash_kernel(query):
        host = _host_ends(query, ends, sizes, length)
        return attention_blocks.backward(
            gradient, query, key, value, output, logarithms, host, window, scale, cap
        )
    lengths, longest = _device_ends(query, ends, sizes, length)
    # Without dropout no random state is read, but the kernel requires one of this type.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, device=query.device)
    queries, keys, values = torch.ops.aten._flash_attention_backward(
        *(gradient, query, key, value, output, logarithms, lengths, lengths, longest, longest),
        *(0.0, window is None, state, unused),
        scale=scale,
        **_reach(window),
    )
    return queries, keys, values


@_attend_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithms: Tensor,
    ends: Tensor | None,
    sizes: Tensor | None,
    length: int,
    window: int | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = (
        torch.empty_like(one, memory_format=torch.contiguous_format) for one in (query, key, value)
    )
    return queries, keys, values


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ends, sizes, *numbers = inputs
    ctx.save_for_backward(query, key, value, *output, ends, sizes)
    ctx.numbers = numbers


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _attend_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *found, None, None, None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_keep)


def _reach(window: int | None) -> dict[str, int]:
    """The kernel's window, excluding the token itself; −1: unlimited."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _host_ends(query: Tensor, ends: Tensor | None, sizes: Tensor | None, length: int) -> list[int]:
    """Cumulative document lengths on the host. On a GPU, in fp32 or fp64, this synchronises."""
    if ends is None or sizes is None:
        return list(range(0, query.shape[0] + 1, length))
    return listed_ends(ends, sizes)


def _device_ends(query: Tensor, ends: Tensor | None, sizes: Tensor | None, length: int) -> tuple[Tensor, int]:
    """Cumulative document lengths on the tokens' device, and the longest; never synchronises."""
    if ends is None or sizes is None:
        tokens = query.shape[0]
        return torch.arange(0, tokens + 1, length, dtype=torch.int32, device=query.device), length
    count, longest = sizes.tolist()
    return ends[: count + 1], longest
