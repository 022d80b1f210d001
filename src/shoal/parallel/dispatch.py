"""Dispatch tokens to the ranks of their experts, one copy per expert, and return the experts' results.

Tokens sorted by expert are thereby sorted by rank. Ranks first exchange how many tokens come for each expert, then the
tokens; the results return the same way. No token is dropped, whatever the routing. An expert without tokens, or a rank
whose experts have none, takes part all the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.models.experts import (
    Compute,
    Mix,
    Order,
    Permute,
    Routed,
    TokensInTransit,
    by_expert,
    spread_by_expert,
)
from shoal.models.grouped_product import on_host
from shoal.parallel.tensor_region import Gather, Scatter
from shoal.parallel.token_exchange import TokenExchange, arrive, depart


class Features:
    """The features of each token that a rank sends: all of them."""

    def outgoing(self, x: Tensor) -> Tensor:
        return x

    def incoming(self, mixed: Tensor) -> Tensor:
        return mixed

    def computed(self, compute: Compute, tokens: Tensor, ends: Tensor) -> Tensor:
        return compute(tokens, ends)


class SplitFeatures(Features):
    """The features that a rank of a tensor group, which has all of its tokens, sends: some of each."""

    def __init__(self, tensor: dist.ProcessGroup, tp: int, index: int) -> None:
        self.tensor, self.tp, self.index = tensor, tp, index

    def outgoing(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.tp, -1))[..., self.index, :]

    def incoming(self, mixed: Tensor) -> Tensor:
        """Pad to all features with zeros: the tensor group's sum at the end of the block completes them."""
        width = mixed.shape[-1]
        return nn.functional.pad(mixed, (self.index * width, (self.tp - 1 - self.index) * width))

    def computed(self, compute: Compute, tokens: Tensor, ends: Tensor) -> Tensor:
        # The gathered tensor has another order; it gets no name, so that only the copy that experts read stays alive.
        whole = Gather.apply(tokens[:, None], self.tensor, self.tp).flatten(1)
        partial = compute(whole, ends).unflatten(1, (self.tp, -1))
        part: Tensor = Scatter.apply(partial, self.tensor, self.tp)
        return part[:, 0]


class Dispatch:
    """Sends one copy of a token to each of its experts."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: int, experts: int, features: Features) -> None:
        """``group``: None if this rank is alone on its node, so there is no rank to send to."""
        self.group, self.ranks, self.experts, self.features = group, ranks, experts, features

    def leaving(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Order]:
        return spread_by_expert(self.features.outgoing(x), chosen, self.experts)

    def send(self, tokens: Tensor, routed: Routed) -> tuple[TokensInTransit, TokensInFlight]:
        # Per rank, and per expert of each rank: how many tokens go there, and how many come from there.
        ends = routed.order.ends.long()
        going = torch.diff(ends, prepend=ends.new_zeros(1)).view(self.ranks, -1)
        coming = self.told(going)
        sent, received = on_host(torch.stack([going, coming]).sum(-1), tokens.shape[0])
        exchange = TokenExchange(sent, received, self.group)
        return (depart(tokens, exchange),), TokensInFlight(self, exchange, coming)

    def told(self, going: Tensor) -> Tensor:
        """Exchange counts: what each rank has for this one."""
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going, group=self.group)
        return coming

    def incoming(self, mixed: Tensor) -> Tensor:
        return self.features.incoming(mixed)


class TokensInFlight:
    """Tokens in flight to the ranks of their experts."""

    def __init__(self, dispatch: Dispatch, exchange: TokenExchange, coming: Tensor) -> None:
        """``coming``: token counts by source rank and local expert."""
        self.dispatch, self.exchange, self.coming = dispatch, exchange, coming
        self.home = TokenExchange(exchange.received, exchange.sent, exchange.group)

    def mixed(
        self, arriving: TokensInTransit, compute: Compute, weights: Tensor, order: Order, mix: Mix
    ) -> Tensor:
        (tokens,) = arriving
        return mix(self.results(self.computed(tokens, compute)), weights, order)

    def computed(self, arriving: Tensor, compute: Compute) -> Tensor:
        """Start sending back what the experts made of the tokens."""
        received = self.exchange.received
        arrived = arrive(arriving, self.exchange)
        del arriving
        # Tokens arrive ordered by source rank; experts need them grouped by expert.
        count = self.coming.shape[1]
        numbers = torch.arange(count, device=self.coming.device).repeat(self.dispatch.ranks)
        whose = numbers.repeat_interleave(self.coming.flatten(), output_size=sum(received))
        order = by_expert(whose, experts=count)
        here: Tensor = Permute.apply(arrived, order.place, order.back)
        del arrived
        computed = self.dispatch.features.computed
        # Unnamed, so that no intermediate holds memory longer than it must.
        return depart(Permute.apply(computed(compute, here, order.ends), order.back, order.place), self.home)

    def results(self, returning: Tensor) -> Tensor:
        """The results, in the order in which the tokens were sent."""
        return arrive(returning, self.home)
