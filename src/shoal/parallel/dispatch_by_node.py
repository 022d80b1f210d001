"""Dispatch tokens to experts on several nodes: once to each node, then on to the ranks of their experts.

A token often has several experts on the same node, and links between nodes are slow. So it is sent once to each node
that has any of its experts, to the rank with the same local index there, along with the ids and weights of all its
experts. That rank copies it for each of its experts on the node, sends the copies over the node's links, adds up the
results with their weights, and returns one sum. The backward pass runs the same way in reverse.

    own tokens ─► one for each node ── across ──► a copy for each expert there ── inside ──► experts
                                                                                                │
    sum over nodes ◄───────────────── across ──── sum, weighted ◄──────────────── inside ───────┘

A rank's tokens travel in two parts (``facts/layout/expert_nodes.PARTS``), so that one part is forwarded inside a node
while the other crosses between nodes or is computed:

    across    1 ─► 2 ─►                          1 ─► 2 ─►
    inside         1 ─► 2 ─►           1 ─► 2 ─►
    experts             1 ───► 2 ───►

Two small messages, sent before any token leaves and read by the host once, say how many tokens come and how many of
them are forwarded to which rank. A node may be one rank: then nothing is forwarded, and tokens travel once to each
rank, all in one part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.facts.layout.expert_nodes import Split, part_sizes
from shoal.models.experts import Collect, Compute, Mix, Order, Routed, Spread, TokensInTransit, by_expert, mix
from shoal.models.mix import mix_rows
from shoal.parallel.dispatch import Dispatch, TokensInFlight
from shoal.parallel.token_exchange import TokenExchange, arrive, depart

# Expert ids travel as bits beside the tokens' values.
AS_WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class NodeDispatch:
    """Sends a token once to each node of its experts."""

    def __init__(self, across: dist.ProcessGroup, split: Split, node: int, inside: Dispatch) -> None:
        """``inside``: dispatch between the ranks of this node, which is node number ``node``."""
        self.across, self.split, self.node, self.inside = across, split, node, inside

    def leaving(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Order]:
        """The tokens unchanged, and their order by part and node: a token counts once per node, at its first expert
        there.
        """
        nodes, count = self.split.nodes, chosen.shape[1]
        whose = chosen // self.split.experts_each
        earlier = torch.ones(count, count, dtype=torch.bool, device=chosen.device).tril(-1)
        again = ((whose[:, :, None] == whose[:, None, :]) & earlier).any(-1)
        groups = self.split.parts * nodes
        group = whose + self._part_of_each(chosen) * nodes
        order = by_expert(group.masked_fill(again, groups).flatten(), groups)
        return self.inside.features.outgoing(x), order

    def send(self, tokens: Tensor, routed: Routed) -> tuple[TokensInTransit, TokensInFlightByNode]:
        sizes = part_sizes(len(tokens), self.split.parts)
        told = self._counts(routed.order, routed.chosen, sizes)
        numbers = routed.chosen.to(AS_WIDE[tokens.element_size()]).view(tokens.dtype)
        rows = torch.cat([tokens, routed.weights, numbers], 1).split(sizes)
        active = routed.chosen.shape[1]
        parts, arriving, first, ordered = [], [], 0, 0
        for own, counts in zip(rows, told, strict=True):
            unsorted, number = slice(first * active, (first + len(own)) * active), sum(counts.sent)
            order = routed.order.part(unsorted, slice(ordered, ordered + number))
            parts.append(part := TokenChunk(self, counts, order, active))
            arriving.append(depart(Spread.apply(own, active, order.place, order.back), part.across))
            first, ordered = first + len(own), ordered + number
        return tuple(arriving), TokensInFlightByNode(parts)

    def _counts(self, order: Order, chosen: Tensor, sizes: list[int]) -> list[Counts]:
        """Exchange counts: each node learns how many tokens come and how many copies each of its experts gets; its
        ranks then tell each other what they will forward. One result per part.
        """
        split = self.split
        nodes, ranks, parts, experts = split.nodes, split.ranks, split.parts, split.experts.count
        leaving = torch.diff(order.ends.long(), prepend=order.ends.new_zeros(1, dtype=torch.int64))
        copies = chosen.new_zeros(parts * experts)
        whose = chosen + self._part_of_each(chosen) * experts
        copies.scatter_add_(0, whose.flatten(), torch.ones_like(chosen).flatten())
        # For each node, per part.
        going = torch.cat([leaving.view(parts, nodes, 1), copies.view(parts, nodes, -1)], 2).transpose(0, 1)
        coming = torch.empty(going.shape, dtype=going.dtype, device=going.device)
        dist.all_to_all_single(coming, going.contiguous(), group=self.across)
        # For each rank of this node, per part.
        onward = coming[:, :, 1:].sum(0).view(parts, ranks, -1).transpose(0, 1).contiguous()
        here = self.inside.told(onward) if ranks > 1 else onward
        numbers = leaving.view(parts, nodes), coming[:, :, 0].T, onward.sum(-1).T, here.sum(-1).T
        lengths = [each.shape[1] for each in numbers]
        read = counts_on_host(torch.cat(numbers, 1), lengths, split, sizes, chosen.shape[1])
        return [
            Counts(sent, received, passed, arrived, here[:, number])
            for number, (sent, received, passed, arrived) in enumerate(read)
        ]

    def incoming(self, mixed: Tensor) -> Tensor:
        return self.inside.features.incoming(mixed)

    def _part_of_each(self, chosen: Tensor) -> Tensor:
        """[tokens, 1]: the part that each token travels in."""
        numbers = torch.arange(len(chosen), device=chosen.device)
        return (numbers >= part_sizes(len(chosen), self.split.parts)[0]).long()[:, None]


class Counts(NamedTuple):
    """Counts of tokens to and from nodes, and of copies to and from ranks of this node."""

    sent: list[int]
    received: list[int]
    onward: list[int]
    here: list[int]
    by_expert: Tensor  # int64 [ranks, experts of a rank]: copies from each rank for each expert here


def counts_on_host(
    counts: Tensor, lengths: list[int], split: Split, sizes: list[int], active: int
) -> list[list[list[int]]]:
    """For each part several row splits, one after the other, as ``models.grouped_product.on_host`` reads them.

    ``sizes``: tokens per part, each with ``active`` experts. A dry run makes the counts up
    (``prove/balanced_routing.py``).
    """
    return [_cut(numbers, lengths) for numbers in counts.tolist()]


def _cut(numbers: list[int], lengths: list[int]) -> list[list[int]]:
    rest = iter(numbers)
    return [[next(rest) for _ in range(length)] for length in lengths]


class TokensInFlightByNode:
    """Tokens in flight to the nodes of their experts."""

    def __init__(self, parts: list[TokenChunk]) -> None:
        self.parts = parts

    def mixed(
        self, arriving: TokensInTransit, compute: Compute, weights: Tensor, order: Order, _: Mix
    ) -> Tensor:
        """Run hop by hop, each over all parts: while one part travels, the next is worked on.

        The number of tokens that arrive changes every time, so their results are summed outside compiled graphs.
        Autograd runs this in reverse and treats gradients as this treats tokens.
        """
        under_way = list(arriving)
        for number, part in enumerate(self.parts):
            under_way[number] = part.passed_on(under_way[number])
        for number, part in enumerate(self.parts):
            under_way[number] = part.computed(under_way[number], compute)
        for number, part in enumerate(self.parts):
            under_way[number] = part.sent_home(under_way[number])
        for number, part in enumerate(self.parts):
            under_way[number] = part.collected(under_way[number])
        return torch.cat(under_way)


class TokenChunk:
    """Some of a rank's tokens, and what the rank forwards of the tokens that arrive meanwhile."""

    # Order and weight of the copies made of what arrived, once it is forwarded.
    here: Order
    weights: Tensor

    def __init__(self, dispatch: NodeDispatch, counts: Counts, order: Order, active: int) -> None:
        """``order``: order of the rank's own tokens, by node."""
        self.dispatch, self.counts, self.order, self.active = dispatch, counts, order, active
        self.across = TokenExchange(counts.sent, counts.received, dispatch.across)
        self.home = TokenExchange(counts.received, counts.sent, dispatch.across)
        inside = dispatch.inside
        onward = TokenExchange(counts.onward, counts.here, inside.group)
        self.inside = TokensInFlight(inside, onward, counts.by_expert)

    def passed_on(self, arriving: Tensor) -> Tensor:
        """Start sending one copy of each arrived token to each of its experts on this node."""
        rows = arrive(arriving, self.across)
        # Expert slots on other nodes sort behind all that are here.
        each, active = self.dispatch.split.experts_each, self.active
        kind = AS_WIDE[rows.element_size()]
        numbers = rows.detach()[:, -active:].contiguous().view(kind).long() - self.dispatch.node * each
        elsewhere = (numbers < 0) | (numbers >= each)
        order = by_expert(numbers.masked_fill_(elsewhere, each).flatten(), each).first(
            sum(self.counts.onward)
        )
        self.here = order
        copies, self.weights = _Open.apply(rows, active, order.place, order.back)
        return copies if self._alone else depart(copies, self.inside.exchange)

    @property
    def _alone(self) -> bool:
        """Whether this rank is the whole node."""
        return self.dispatch.split.ranks == 1

    def computed(self, copies: Tensor, compute: Compute) -> Tensor:
        """Run this rank's experts on the copies forwarded to them, and start sending the results back."""
        if self._alone:
            return self.dispatch.inside.features.computed(compute, copies, self.here.ends)
        return self.inside.computed(copies, compute)

    def sent_home(self, returning: Tensor) -> Tensor:
        """Add up this node's results for each arrived token, and start sending the sums back to the tokens' ranks."""
        return depart(self._of_this_node(returning), self.home)

    def _of_this_node(self, returning: Tensor) -> Tensor:
        results = returning if self._alone else self.inside.results(returning)
        return mix(results, self.weights, self.here)

    def collected(self, returning: Tensor) -> Tensor:
        """The sum over nodes, for the rank's own tokens."""
        order = self.order
        added: Tensor = Collect.apply(arrive(returning, self.home), self.active, order.place, order.back)
        return added


class _Open(torch.autograd.Function):
    """Rows with weights and ids of k experts → one copy of each token per local expert, and the weights."""

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
