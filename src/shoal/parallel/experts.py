"""Expert parallelism (``ep``): neighbouring data ranks hold different experts, and send each other tokens.

Of every layer with experts, each of ``ep`` ranks has an equal part of the routed ones, in order. Tokens, sorted by
expert, are thereby sorted by rank. Ranks first tell each other how many come for each expert, then send the tokens, and
the experts' results go back the same way. No token is dropped, whatever the routing; an expert without tokens, or a
rank whose experts have none, takes part all the same. All else of the network is what it is without ``ep``.

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
        experts = mixture.experts
        for projection in experts.children():
            assert isinstance(projection, GroupedLinear)
            count, *matrix = projection.weight.shape
            projection.weight = nn.Parameter(projection.weight.new_empty(count // ranks.size, *matrix))
        experts.travel = dispatch
        if tensor is not None:
            experts.travel = FeatureDispatch(group, ranks.size, tensor, mesh.layout.tp, mesh.coords["tp"])


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

    def run(self, compute: Compute, tokens: Tensor, ends: Tensor) -> Tensor:
        # By rank, and of each rank by expert: how many tokens go there, and how many come from there.
        going = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64)).view(self.ranks, -1)
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going, group=self.group)
        sent, received = on_host(torch.stack([going, coming]).sum(-1), tokens.shape[0])
        arrived: Tensor = _AllToAll.apply(tokens, sent, received, self.group)
        del tokens
        # What arrives is in order of the ranks that it comes from; experts want each its own.
        count = coming.shape[1]
        numbers = torch.arange(count, device=coming.device).repeat(self.ranks)
        order = by_expert(
            numbers.repeat_interleave(coming.flatten(), output_size=sum(received)), experts=count
        )
        here: Tensor = Permute.apply(arrived, order.place, order.back)
        del arrived
        back: Tensor = Permute.apply(self.computed(compute, here, order.ends), order.back, order.place)
        returned: Tensor = _AllToAll.apply(back, received, sent, self.group)
        return returned

    def computed(self, compute: Compute, tokens: Tensor, ends: Tensor) -> Tensor:
        return compute(tokens, ends)


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


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group, so many to each; its backward pass sends their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
