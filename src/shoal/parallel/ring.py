"""Ring attention (``cp_kind=ring``): keys and values go round the ranks; queries and results stay.

In each of cp turns a rank attends with one rank's keys and values. It first starts passing them on to the next rank, so
communication overlaps with computation. Partial results are merged by their log-sum-exps. Every rank has the same
causal work in every turn (``facts/layout/ring_blocks.py``).

In the backward pass, keys and values go round once more. Their gradients follow them, each rank adding its part, and
end at their owner, where the owner's own part waits for them. Gradients travel in the dtype of keys and values.

Each turn is a custom operator: the compiler does not trace into it, and a dry run sees the tensors that a real device
has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.facts.layout.ring_blocks import rectangles
from shoal.models import attention_rectangle
from shoal.models.attention_blocks import logarithm_dtype
from shoal.models.documents import Documents, listed_ends
from shoal.parallel.ring_exchange import Passing, pass_on


@dataclass(frozen=True)
class Ring:
    """This rank's place among the ranks that share a sequence."""

    group: dist.ProcessGroup
    ranks: int
    index: int

    def source(self, turn: int) -> int:
        """The rank whose keys and values are here in a given turn."""
        return (self.index - turn) % self.ranks

    def pass_on(self, tensor: Tensor) -> Passing:
        return pass_on(tensor, self.group, self.ranks, self.index)


class RingAttend:
    """Replaces ``attend``: queries, keys and values are those of this rank's tokens."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

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
        ends, sizes = (None, None) if documents is None else (documents.host_ends, documents.sizes)
        mixed: Tensor = RingAttention.apply(query, key, value, ends, sizes, self.ring, window, scale, cap)
        return mixed


class RingAttention(torch.autograd.Function):
    """[B, heads, tokens, head_dim] in and out."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor | None,
        sizes: Tensor | None,
        ring: Ring,
        window: int | None,
        scale: float,
        cap: float | None,
    ) -> Tensor:
        queries = query.transpose(1, 2).contiguous()
        own = torch.stack([key.transpose(1, 2), value.transpose(1, 2)])
        held, total, logarithms = own, None, None
        for turn in range(ring.ranks):
            more = turn + 1 < ring.ranks
            passing = ring.pass_on(held) if more else None
            place = ring.ranks, ring.index, ring.source(turn)
            total, logarithms = attend_turn(
                queries, held, total, logarithms, ends, sizes, *place, not more, window, scale, cap
            )
            if passing is not None:
                held = passing.wait()
        assert total is not None and logarithms is not None
        ctx.save_for_backward(queries, own, total, logarithms, ends, sizes)
        ctx.ring, ctx.scores = ring, (window, scale, cap)
        return total.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, held, output, logarithms, ends, sizes = ctx.saved_tensors
        ring = ctx.ring
        entering = gradient.transpose(1, 2).contiguous()
        if torch.compiler.is_compiling():
            held = in_backward(held, entering)
        changes: Tensor | None = None
        own: Tensor | None = None
        following: Passing | None = None
        for turn in range(ring.ranks):
            passing = ring.pass_on(held) if turn + 1 < ring.ranks else None
            place = ring.ranks, ring.index, ring.source(turn)
            changes, part = attend_turn_backward(
                *(entering, queries, held, output, logarithms, changes, ends, sizes),
                *(*place, passing is None, *ctx.scores),
            )
            if passing is None:
                held = part  # done with the last keys and values
            if turn == 0:
                own = part
            else:
                if following is not None:
                    part.add_(following.wait())
                following = None  # release them before the next ones arrive
                following = ring.pass_on(part)
            if passing is not None:
                held = passing.wait()
        assert changes is not None and own is not None and following is not None
        keys, values = own.add_(following.wait()).transpose(2, 3).unbind(0)
        return changes.transpose(1, 2), keys, values, None, None, None, None, None, None


@torch.library.custom_op("shoal::attend_turn", mutates_args=())
def attend_turn(
    query: Tensor,  # [B, tokens, heads, head_dim]
    keys_values: Tensor,  # [2, B, tokens, key heads, head_dim]
    total: Tensor | None,  # the result of earlier turns, and its log-sum-exp [B, heads, tokens]
    logarithms: Tensor | None,
    ends: Tensor | None,  # see Documents, on the host; None: one document per row
    sizes: Tensor | None,
    ranks: int,
    index: int,
    source: int,  # the rank whose keys these are
    last: bool,  # return the result in the queries' dtype; before the last turn it is at least fp32
    window: int | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Merge attention to these keys and values into the result; returns the new result and its log-sum-exp."""
    rows, tokens, heads, _ = query.shape
    wide = logarithm_dtype(query)
    if total is None or logarithms is None:
        total = torch.zeros_like(query, dtype=wide)
        logarithms = query.new_full((rows, heads, tokens), -torch.inf, dtype=wide)
    else:
        total, logarithms = total.clone(), logarithms.clone()
    for seen in rectangles(ranks, index, source, rows, tokens, _listed(ends, sizes), window):
        among, mine = slice(seen.first_row, seen.last_row), slice(seen.begin, seen.end)
        key, value = keys_values[:, among, seen.keys_begin : seen.keys_end]
        part, more = attention_rectangle.forward(query[among, mine], key, value, seen, scale, cap)
        attention_rectangle.merge(total[among, mine], logarithms[among, :, mine], part, more)
    return total.to(query.dtype) if last else total, logarithms


@attend_turn.register_fake
def _(
    query: Tensor,
    keys_values: Tensor,
    total: Tensor | None,
    logarithms: Tensor | None,
    ends: Tensor | None,
    sizes: Tensor | None,
    ranks: int,
    index: int,
    source: int,
    last: bool,
    window: int | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    rows, tokens, heads, _ = query.shape
    wide = logarithm_dtype(query)
    return torch.empty_like(query, dtype=query.dtype if last else wide), query.new_empty(
        (rows, heads, tokens), dtype=wide
    )


@torch.library.custom_op("shoal::attend_turn_backward", mutates_args=())
def attend_turn_backward(
    gradient: Tensor,
    query: Tensor,
    keys_values: Tensor,
    output: Tensor,
    logarithms: Tensor,
    changes: Tensor | None,  # the queries' gradient from earlier turns
    ends: Tensor | None,
    sizes: Tensor | None,
    ranks: int,
    index: int,
    source: int,
    last: bool,
    window: int | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """The queries' gradient including this turn, and this rank's part of the gradient of these keys and values."""
    rows, tokens, _, _ = query.shape
    wide = torch.zeros_like(query, dtype=logarithm_dtype(query)) if changes is None else changes.clone()
    found = torch.zeros_like(keys_values)
    for seen in rectangles(ranks, index, source, rows, tokens, _listed(ends, sizes), window):
        among, mine = slice(seen.first_row, seen.last_row), slice(seen.begin, seen.end)
        theirs = slice(seen.keys_begin, seen.keys_end)
        key, value = keys_values[:, among, theirs]
        queries, keys, values = attention_rectangle.backward(
            *(gradient[among, mine], query[among, mine], key, value, output[among, mine]),
            *(logarithms[among, :, mine], seen, scale, cap),
        )
        wide[among, mine] += queries
        found[0, among, theirs] += keys
        found[1, among, theirs] += values
    return wide.to(query.dtype) if last else wide, found


@attend_turn_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    keys_values: Tensor,
    output: Tensor,
    logarithms: Tensor,
    changes: Tensor | None,
    ends: Tensor | None,
    sizes: Tensor | None,
    ranks: int,
    index: int,
    source: int,
    last: bool,
    window: int | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    dtype = query.dtype if last else logarithm_dtype(query)
    return torch.empty_like(query, dtype=dtype), torch.empty_like(keys_values)


@torch.library.custom_op("shoal::in_backward", mutates_args=())
def in_backward(keys_values: Tensor, gradient: Tensor) -> Tensor:
    """A copy that depends on ``gradient``, so that the compiler leaves what uses it in the backward pass.

    Otherwise the compiler would merge the two equal exchanges, and move whatever depends only on the forward pass
    there: it would keep the keys and values of all ranks from the forward to the backward pass.
    """
    return keys_values.clone()


@in_backward.register_fake
def _(keys_values: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(keys_values)


def _listed(ends: Tensor | None, sizes: Tensor | None) -> list[int] | None:
    """Cumulative document lengths as a list; never synchronises with a device."""
    return None if ends is None or sizes is None else listed_ends(ends, sizes)
