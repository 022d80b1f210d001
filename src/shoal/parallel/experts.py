"""Expert parallelism (``ep``): neighbouring data ranks hold different experts, and send each other tokens.

Of every layer with experts, each of ``ep`` ranks has an equal part of the routed ones, in order. Tokens, sorted by
expert, are thereby sorted by rank. Ranks first tell each other how many come for each expert, then send the tokens, and
the experts' results go back the same way. No token is dropped, whatever the routing; an expert without tokens, or a
rank whose experts have none, takes part all the same. All else of the network is what it is without ``ep``.

While tokens travel, the experts that every token uses are computed (``MixtureOfExperts.forward``); and in the backward
pass, which goes the same way in reverse, while the tokens' gradients travel back.

With tensor parallelism every expert's features are split too. All ranks of a tensor group then have all of its tokens:
each sends its own 1/tp of the features of every token, so that over ``ep`` a token travels once, and the tensor group
of the expert puts them together. Likewise on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.facts.layout.parameter_groups import expert_ranks
from shoal.models.decoder import Network
from shoal.models.experts import Compute, GroupedLinear, MixtureOfExperts, Permute, by_expert, on_host
from shoal.parallel.mesh import Mesh
from shoal.parallel.tensor_region import Gather, Scatter


def split(network: Network, mesh: Mesh) -> None:
    """Keep this rank's experts of a network on the meta device, whose features may be split already."""
    ranks = expert_ranks(mesh.layout)
    group, tensor = mesh.group_of(ranks), mesh.group("tp")
    assert group is not None
    dispatch = Dispatch(group, ranks.size)
    for mixture in mixtures(network):
        for projection in mixture.experts.children():
            assert isinstance(projection, GroupedLinear)
            count, *matrix = projection.weight.shape
            held = projection.weight.new_empty(count // ranks.size, *matrix)
            projection.weight = nn.Parameter(held, projection.weight.requires_grad)
        mixture.travel = dispatch
        if tensor is not None:
            mixture.travel = FeatureDispatch(group, ranks.size, tensor, mesh.layout.tp, mesh.coords["tp"])


def mixtures(module: nn.Module) -> list[MixtureOfExperts]:
    return [child for child in module.modules() if isinstance(child, MixtureOfExperts)]


class Dispatch:
    """Sends tokens to the ranks of their experts, and results back."""

    def __init__(self, group: dist.ProcessGroup, ranks: int) -> None:
        self.group, self.ranks = group, ranks

    def outgoing(self, x: Tensor) -> Tensor:
        return x

    def incoming(self, mixed: Tensor) -> Tensor:
        return mixed

    def send(self, tokens: Tensor, ends: Tensor) -> tuple[Tensor, SentTokens]:
        # By rank, and of each rank by expert: how many tokens go there, and how many come from there.
        going = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64)).view(self.ranks, -1)
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going, group=self.group)
        sent, received = on_host(torch.stack([going, coming]).sum(-1), tokens.shape[0])
        exchange = TokenExchange(sent, received, self.group)
        arriving: Tensor = _Depart.apply(tokens, exchange)
        return arriving, SentTokens(self, exchange, coming)

    def computed(self, compute: Compute, tokens: Tensor, ends: Tensor) -> Tensor:
        return compute(tokens, ends)


class SentTokens:
    """Tokens on their way to the ranks of their experts."""

    def __init__(self, dispatch: Dispatch, exchange: TokenExchange, coming: Tensor) -> None:
        """``coming``: how many from each rank for each expert here."""
        self.dispatch, self.exchange, self.coming = dispatch, exchange, coming

    def results(self, arriving: Tensor, compute: Compute) -> Tensor:
        sent, received = self.exchange.sent, self.exchange.received
        arrived: Tensor = _Arrive.apply(arriving, self.exchange)
        del arriving
        # What arrives is in order of the ranks that it comes from; experts want each its own.
        count = self.coming.shape[1]
        numbers = torch.arange(count, device=self.coming.device).repeat(self.dispatch.ranks)
        whose = numbers.repeat_interleave(self.coming.flatten(), output_size=sum(received))
        order = by_expert(whose, experts=count)
        here: Tensor = Permute.apply(arrived, order.place, order.back)
        del arrived
        exchange = TokenExchange(received, sent, self.dispatch.group)
        # Under no name, so that nothing on the way takes room for longer than it has to.
        leaving = _Depart.apply(
            Permute.apply(self.dispatch.computed(compute, here, order.ends), order.back, order.place),
            exchange,
        )
        returned: Tensor = _Arrive.apply(leaving, exchange)
        return returned


class FeatureDispatch(Dispatch):
    """As ``Dispatch``, where each rank of a tensor group sends some features of all tokens."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: int, tensor: dist.ProcessGroup, tp: int, index: int
    ) -> None:
        super().__init__(group, ranks)
        self.tensor, self.tp, self.index = tensor, tp, index

    def outgoing(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.tp, -1))[..., self.index, :]

    def incoming(self, mixed: Tensor) -> Tensor:
        """All features, of which the others are zero: what leaves the block is the sum over the tensor group."""
        width = mixed.shape[-1]
        return nn.functional.pad(mixed, (self.index * width, (self.tp - 1 - self.index) * width))

    def computed(self, compute: Compute, tokens: Tensor, ends: Tensor) -> Tensor:
        # What is gathered has another order: under no name, so that experts read the one copy that there is.
        whole = Gather.apply(tokens[:, None], self.tensor, self.tp).flatten(1)
        partial = compute(whole, ends).unflatten(1, (self.tp, -1))
        part: Tensor = Scatter.apply(partial, self.tensor, self.tp)
        return part[:, 0]


class TokenExchange:
    """Rows to the ranks of a group, so many to each, and their gradients back: begun, and later waited for."""

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        self.sent, self.received, self.group = sent, received, group
        # What arrives, what was sent, which must stay until then, and the work itself.
        self._under_way: tuple[Tensor, Tensor, dist.Work] | None = None

    def begin(self, rows: Tensor, back: bool = False) -> Tensor:
        """What will have arrived when it has been waited for."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        rows = rows.contiguous()
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(arriving, rows, received, sent, group=self.group, async_op=True)
        self._under_way = arriving, rows, work
        return arriving

    def wait(self) -> Tensor:
        assert self._under_way is not None
        (arrived, _, work), self._under_way = self._under_way, None
        work.wait()
        return arrived


class _Depart(torch.autograd.Function):
    """Rows begin to travel. In the backward pass the wait for their gradients, which ``_Arrive`` has sent."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Arrive(torch.autograd.Function):
    """The wait for rows. In the backward pass their gradients begin to travel.

    They have another shape where they arrive, so what autograd is given meanwhile are the gradients that were sent.
    """

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.begin(gradient, back=True)
        return gradient, None
