"""Attention: the projections, and ``attend``, the one function that context parallelism replaces."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.facts.cluster.attention_kernels import repeats_keys
from shoal.facts.model import Model
from shoal.models.documents import Documents
from shoal.models.linear import Linear
from shoal.models.norm import RMSNorm
from shoal.models.rotary import Rotation, rotate
from shoal.models.varlen import attend_within


class Attend(Protocol):
    """Attention over a row: [B, heads, T, head_dim] in and out; keys and values may have fewer heads."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        documents: Documents | None,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
    ) -> Tensor: ...


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    documents: Documents | None,
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> Tensor:
    """Softmax attention, causal within each token's document and window.

    With a ``cap``, scores are cap · tanh(score / cap), which no SDPA kernel supports.

    Positions ascend within a document, so causal by position is causal by index, which kernels implement without a
    mask. For rows of a single document without a window, SDPA's causal kernel is fastest; everything else uses
    variable-length attention, which computes only what is visible.
    """
    within = window if window is not None and window < key.shape[2] else None
    if documents is not None or within is not None or cap is not None:
        return attend_within(query, key, value, documents, within, scale, cap)
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and repeats_keys(query.element_size()):
        key, value = (heads.repeat_interleave(shared, dim=1) for heads in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """[B, heads, T, head_dim], rotated; in a compiled block laid out by token, as projections read and write.

    Attention kernels return outputs and gradients in the layout of their queries, so nothing is copied between them
    and the projections, which took 3 of a 1.2B model's 507 ms. Uncompiled, the layout stays by head: otherwise the
    tensors saved for the backward pass would change.
    """
    if not torch.compiler.is_compiling():
        return rotate(heads, rotation)
    cosine, sine = (table.transpose(1, 2) for table in rotation)
    return rotate(heads.transpose(1, 2), (cosine, sine)).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values; ``attend`` may be replaced from outside."""

    attend: Attend

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj = Linear(model.hidden, heads, bias=model.qkv_bias)
        self.k_proj = Linear(model.hidden, kv_heads, bias=model.qkv_bias)
        self.v_proj = Linear(model.hidden, kv_heads, bias=model.qkv_bias)
        self.o_proj = Linear(heads, model.hidden, bias=model.out_bias)
        self.q_norm, self.k_norm = (
            RMSNorm(model.head_dim, model.norm_eps, model.norm_offset) if model.qk_norm else None
            for _ in range(2)
        )
        self.head_dim, self.scale, self.cap = model.head_dim, model.score_scale, model.attention_cap
        self.window = model.layer_window(layer)
        self.attend = attend

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        positions: Tensor,
        documents: Documents | None,
        noise: Tensor | None = None,
    ) -> Tensor:
        query = self.heads(self.q_proj(x, positions, noise), self.q_norm)
        key = self.heads(self.k_proj(x, positions, noise), self.k_norm)
        value = self.heads(self.v_proj(x, positions, noise), None)
        if rotation is not None:
            query, key = rotated(query, rotation), rotated(key, rotation)
        mixed = self.attend(
            *(query, key, value, positions, documents), scale=self.scale, window=self.window, cap=self.cap
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2), positions, noise)
        return output

    def heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        """[B, T, heads·head_dim] → [B, heads, T, head_dim]. The number of heads follows from the tensor."""
        split = projected.view(*projected.shape[:-1], -1, self.head_dim)
        normed: Tensor = split if norm is None else norm(split)
        return normed.transpose(1, 2)
