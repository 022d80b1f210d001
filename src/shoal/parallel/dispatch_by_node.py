"""Tokens to experts on several nodes: once to each node, and from there on to the ranks of their experts.

A token's experts are often several of one node's, and links between nodes are slow. So it is sent once to each node
that has one of its experts, to the rank of the same place there, with the numbers and weights of all its experts. That
rank makes a copy for each of them that is on its node, sends these on over the node's links, adds up what comes back,
each with its weight, and returns one sum. The backward pass goes the same way in reverse.

    own tokens ─► one for each node ── across ──► a copy for each expert there ── inside ──► experts
                                                                                                │
    sum over nodes ◄───────────────── across ──── sum, weighted ◄──────────────── inside ───────┘

How many tokens come, and how many of them go on to whom, is told in two small messages before any token leaves, and
read by the host once. A node may be one rank: then nothing is sent on, and a token travels once to each rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.facts.layout.expert_nodes import Split
from shoal.models.experts import Collect, Compute, Mix, Order, Routed, Spread, by_expert, mix
from shoal.models.mix import mix_rows
from shoal.parallel.dispatch import Dispatch, SentTokens
from shoal.parallel.token_exchange import TokenExchange, arrive, depart

# Numbers of experts travel as bits beside the tokens' values.
AS_WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class NodeDispatch:
    """Sends a token to each node of its experts."""

    def __init__(self, across: dist.ProcessGroup, split: Split, node: int, inside: Dispatch) -> None:
        """``inside``: between the ranks of this node, the ``node``-th."""
        self.across, self.split, self.node, self.inside = across, split, node, inside

    def leaving(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Order]:
        """Tokens as they are; their order is by node, of those of their experts that are a node's first."""
        nodes, count = self.split.nodes, chosen.shape[1]
        whose = chosen // self.split.experts_each
        earlier = torch.ones(count, count, dtype=torch.bool, device=chosen.device).tril(-1)
        again = ((whose[:, :, None] == whose[:, None, :]) & earlier).any(-1)
        order = by_expert(whose.masked_fill(again, nodes).flatten(), nodes)
        return self.inside.features.outgoing(x), order

    def send(self, tokens: Tensor, routed: Routed) -> tuple[Tensor, TokensOfNodes]:
        counts = self._counts(routed.order, routed.chosen)
        numbers = routed.chosen.to(AS_WIDE[tokens.element_size()]).view(tokens.dtype)
        rows = torch.cat([tokens, routed.weights, numbers], 1)
        order = routed.order.first(sum(counts.sent))
        exchange = TokenExchange(counts.sent, counts.received, self.across)
        leaving = Spread.apply(rows, routed.chosen.shape[1], order.place, order.back)
        return depart(leaving, exchange), TokensOfNodes(self, exchange, counts, routed.chosen.shape[1])

    def _counts(self, order: Order, chosen: Tensor) -> Counts:
        """Each node is told how many tokens come and how many copies are for which of its experts; with that its ranks
        tell each other what they will pass on.
        """
        leaving = torch.diff(order.ends.long(), prepend=order.ends.new_zeros(1, dtype=torch.int64))
        copies = chosen.new_zeros(self.split.experts.count)
        copies.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        going = torch.cat([leaving[:, None], copies.view(self.split.nodes, -1)], 1)
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going, group=self.across)
        onward = coming[:, 1:].sum(0).view(self.split.ranks, -1)
        here = self.inside.told(onward) if self.split.ranks > 1 else onward
        parts = leaving, coming[:, 0], onward.sum(-1), here.sum(-1)
        sent, received, passed, arriving = counts_on_host(
            torch.cat(parts), [len(part) for part in parts], self.split, chosen.shape
        )
        return Counts(sent, received, passed, arriving, here)

    def incoming(self, mixed: Tensor) -> Tensor:
        return self.inside.features.incoming(mixed)


class Counts(NamedTuple):
    """Of tokens to and from nodes; of copies to and from ranks of this one."""

    sent: list[int]
    received: list[int]
    onward: list[int]
    here: list[int]
    by_expert: Tensor  # int64 [ranks, experts of a rank]: copies from each rank for each expert here


def counts_on_host(counts: Tensor, lengths: list[int], split: Split, chosen: torch.Size) -> list[list[int]]:
    """Several divisions of rows, one after the other, as ``models.grouped_product.on_host`` reads them.

    ``chosen``: tokens and experts of each. A dry run makes them up (``prove/balanced_routing.py``).
    """
    numbers = iter(counts.tolist())
    return [[next(numbers) for _ in range(length)] for length in lengths]


class TokensOfNodes:
    """Tokens on their way to the nodes of their experts."""

    def __init__(self, dispatch: NodeDispatch, exchange: TokenExchange, counts: Counts, active: int) -> None:
        self.dispatch, self.exchange, self.counts, self.active = dispatch, exchange, counts, active

    def mixed(self, arriving: Tensor, compute: Compute, weights: Tensor, order: Order, mix: Mix) -> Tensor:
        made = self._of_this_node(arriving, compute)
        del arriving
        exchange = TokenExchange(self.exchange.received, self.exchange.sent, self.exchange.group)
        leaving = depart(made, exchange)
        del made
        sums = order.first(sum(self.exchange.sent))
        added: Tensor = Collect.apply(arrive(leaving, exchange), self.active, sums.place, sums.back)
        return added

    def _of_this_node(self, arriving: Tensor, compute: Compute) -> Tensor:
        """What this node's experts made of each token that has come, added up."""
        dispatch, counts, active = self.dispatch, self.counts, self.active
        rows = arrive(arriving, self.exchange)
        del arriving
        # Where none of the node's: behind all that are.
        each = dispatch.split.experts_each
        kind = AS_WIDE[rows.element_size()]
        numbers = rows.detach()[:, -active:].contiguous().view(kind).long() - dispatch.node * each
        elsewhere = (numbers < 0) | (numbers >= each)
        order = by_expert(numbers.masked_fill_(elsewhere, each).flatten(), each).first(sum(counts.onward))
        copies, weights = _Open.apply(rows, active, order.place, order.back)
        del rows
        inside = dispatch.inside
        if dispatch.split.ranks == 1:
            return mix(inside.features.computed(compute, copies, order.ends), weights, order)
        exchange = TokenExchange(counts.onward, counts.here, inside.group)
        sent = SentTokens(inside, exchange, counts.by_expert)
        leaving = depart(copies, exchange)
        del copies
        return sent.mixed(leaving, compute, weights, order, mix)


class _Open(torch.autograd.Function):
    """Rows with weights and numbers of k experts → a copy of each token for every expert that is here, and weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, active: int, place: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(back)
        ctx.active = active
        tokens, weights, _ = rows.split([rows.shape[1] - 2 * active, active, active], 1)
        return tokens.index_select(0, place // active), weights.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, copies: Tensor, weights: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        of_tokens = mix_rows(copies, back, ctx.active)
        return torch.cat([of_tokens, weights, torch.zeros_like(weights)], 1), None, None, None
