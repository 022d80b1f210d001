"""The residual stream under tensor parallelism: whole on every rank, or split along the sequence.

Split projections need the whole sequence and produce partial sums. Each way into and out of the stream is a collective
whose backward is the mirror collective.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.renamed import all_gather_single, reduce_scatter_single


class TensorRegion:
    """How one rank of a tensor group reads and writes the residual stream [B, T, hidden].

    With sequence parallelism a rank keeps T / ranks tokens, in order of rank, and norms, dropouts and additions work on
    those alone. Without it every rank keeps, and works on, all of them; the traffic is the same.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: int, index: int, sp: bool) -> None:
        self.group = group
        self.ranks = ranks
        self.index = index
        self.sp = sp

    def enter(self, hidden: Tensor) -> Tensor:
        """All tokens, for projections of which this rank computes some features.

        Autograd saves the gathered result for the weight gradient. Megatron saves the local tokens and gathers again:
        less memory, more traffic. Here recomputation makes that trade.
        """
        gathered: Tensor = (Gather if self.sp else SumBackward).apply(hidden, self.group, self.ranks)
        return gathered

    def leave(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' partial results, for the tokens that this rank keeps."""
        summed: Tensor = (Scatter if self.sp else SumForward).apply(partial, self.group, self.ranks)
        return summed

    def total(self, partial: Tensor) -> Tensor:
        """Sum values without gradient over all ranks."""
        return all_reduce(partial, self.group)

    def local(self, places: Tensor) -> Tensor:
        """The columns of [B, T] that belong to the tokens this rank keeps."""
        if not self.sp:
            return places
        tokens = places.shape[1] // self.ranks
        return places.narrow(1, self.index * tokens, tokens)


class Gather(torch.autograd.Function):
    """Forward: all-gather the ranks' tokens. Backward: reduce-scatter the gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return all_gather(local, group, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(gradient, ctx.group, ctx.ranks), None, None


class Scatter(torch.autograd.Function):
    """Forward: reduce-scatter partial results, each rank keeps its tokens. Backward: all-gather the gradients."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return reduce_scatter(partial, group, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.group, ctx.ranks), None, None


class SumBackward(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce, since each rank's gradient covers only its features."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce(gradient, ctx.group), None, None


class SumForward(torch.autograd.Function):
    """Forward: all-reduce partial results. Backward: identity, since every rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
        return all_reduce(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


# The collectives, out of place: selective recomputation may have saved a matmul's output. Inside a compiled block they
# are torch's functional collectives, which the compiler sees and keeps in order; the sums are the same.


def all_gather(local: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """[B, t, hidden] of each rank → [B, T, hidden]."""
    batch, tokens, width = local.shape
    if torch.compiler.is_compiling():
        gathered = functional("all_gather_into_tensor", local.contiguous(), ranks, group.group_name)
    else:
        gathered = local.new_empty(ranks * batch, tokens, width)
        all_gather_single(gathered, local.contiguous(), group=group)
    # Collectives concatenate ranks in the first dimension. With one row that already is the sequence, and nothing is
    # copied.
    return gathered.view(ranks, batch, tokens, width).transpose(0, 1).reshape(batch, ranks * tokens, width)


def reduce_scatter(partial: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """[B, T, hidden] of each rank → the sum's [B, t, hidden] of this one."""
    by_rank = partial.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    if torch.compiler.is_compiling():
        return functional("reduce_scatter_tensor", by_rank.flatten(0, 1), "sum", ranks, group.group_name)
    summed = torch.empty_like(by_rank[0])
    reduce_scatter_single(summed, by_rank.flatten(0, 1), group=group)
    return summed


def all_reduce(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional("all_reduce", partial.contiguous(), "sum", group.group_name)
    summed = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed


def functional(name: str, *arguments: Any) -> Tensor:
    """Issue a collective as an operator, and wait for it. Private to torch, which has no other form the compiler
    accepts.
    """
    begun = getattr(torch.ops._c10d_functional, name).default(*arguments)
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor.default(begun)
    return arrived
