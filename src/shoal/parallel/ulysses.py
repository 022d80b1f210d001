"""Ulysses attention (``cp_kind=ulysses``): ranks trade tokens for heads before attention, and back after it.

A rank holds some tokens of every row with all heads. An all-to-all leaves it with all tokens and 1/cp of the heads, on
which any attention works unchanged; a second one returns the results. With fewer key/value heads than ranks, each head
is sent to all ranks whose queries read it, as in tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.models.attention import Attend
from shoal.models.documents import Documents
from shoal.parallel.tensor_region import functional


class UlyssesAttend:
    """Replaces ``attend`` and calls the original with whole rows."""

    def __init__(self, group: dist.ProcessGroup, ranks: int, attend: Attend) -> None:
        self.group, self.ranks, self.attend = group, ranks, attend

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
    ) -> Tensor:
        """``documents`` describe the whole rows."""
        copies = self.ranks // key.shape[1]
        if copies > 1:
            key, value = (heads.repeat_interleave(copies, dim=1) for heads in (key, value))
        query, key, value = (HeadsOfRank.apply(one, self.group, self.ranks) for one in (query, key, value))
        mixed = self.attend(query, key, value, positions, documents, scale=scale, window=window, cap=cap)
        output: Tensor = TokensOfRank.apply(mixed, self.group, self.ranks)
        return output


class HeadsOfRank(torch.autograd.Function):
    """[B, heads, tokens of a rank, head_dim] → [B, heads of a rank, tokens, head_dim]."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return heads_of_rank(local, group, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return tokens_of_rank(gradient, ctx.group, ctx.ranks), None, None


class TokensOfRank(torch.autograd.Function):
    """The inverse of ``HeadsOfRank``."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return tokens_of_rank(whole, group, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return heads_of_rank(gradient, ctx.group, ctx.ranks), None, None


# Token by token, the layout of projections: with one row the result arrives in order and nothing is copied.


def heads_of_rank(local: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
    by_rank = (
        local.transpose(1, 2).unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)
    )  # [ranks, B, t, heads, d]
    arrived = all_to_all(by_rank.contiguous(), group)
    return arrived.transpose(0, 1).flatten(1, 2).transpose(1, 2)


def tokens_of_rank(whole: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
    by_rank = whole.transpose(1, 2).unflatten(1, (ranks, -1)).transpose(0, 1)  # [ranks, B, t, heads, d]
    arrived = all_to_all(by_rank.contiguous(), group)
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def all_to_all(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange; returns what each rank has for this one, in rank order."""
    if torch.compiler.is_compiling():
        sizes = [1] * by_rank.shape[0]
        return functional("all_to_all_single", by_rank, sizes, sizes, group.group_name)
    arrived = torch.empty_like(by_rank)
    dist.all_to_all_single(arrived, by_rank, group=group)
    return arrived
