"""Mixture of experts in place of an MLP: each token goes to a few of many small MLPs, and no token is dropped.

Tokens are sorted by expert, so each expert's are contiguous, and multiplied with all experts' matrices in one grouped
product. The outputs return to token order and are summed with their weights. Copying and summing are autograd
functions of our own, because torch's would add gradients of the same token in nondeterministic order on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.facts.model import Model
from shoal.models.gated import way_out
from shoal.models.grouped_product import packed_product, product
from shoal.models.mix import mix_rows, spread_rows
from shoal.models.mlp import MLP
from shoal.models.nf4 import PACKED
from shoal.models.router import Router, RouterLosses, Routing


class Order(NamedTuple):
    """The permutation of tokens sorted by expert. T tokens with k experts each have T·k copies."""

    place: Tensor  # int64 [T·k]: for each sorted copy, its unsorted index
    back: Tensor  # int64 [T·k]: for each unsorted copy, its sorted index
    ends: Tensor  # int32 [experts]: the end of each expert's range

    def first(self, number: int) -> Order:
        """Only the first ``number`` sorted copies; the dropped ones have a ``back`` past the end."""
        return self._replace(place=self.place[:number].clone())

    def part(self, unsorted: slice, ordered: slice) -> Order:
        """Only the copies ``unsorted``, whose sorted positions are ``ordered``; some may be sorted behind all others,
        and those are dropped. ``ends`` stay those of the whole.
        """
        place, back = self.place[ordered] - unsorted.start, self.back[unsorted] - ordered.start
        return self._replace(place=place, back=back)


def by_expert(chosen: Tensor, experts: int) -> Order:
    """``chosen``: the expert of each token or copy, one-dimensional; the value ``experts`` means none."""
    return Order(*sort_by_expert(chosen, experts))


@torch.library.custom_op("shoal::sort_by_expert", mutates_args=())
def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of ``Order``. A custom operator, so that compiled blocks can save its small outputs by name."""
    # 16 bits, which a GPU sorts in half the time of 64.
    ordered, place = chosen.to(torch.int16).sort(stable=True)
    back = torch.empty_like(place).scatter_(0, place, torch.arange(place.numel(), device=place.device))
    numbers = torch.arange(experts, dtype=torch.int16, device=chosen.device)
    return place, back, torch.searchsorted(ordered, numbers, right=True, out_int32=True)


@sort_by_expert.register_fake
def _unsorted(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    place, back = (chosen.new_empty(chosen.shape, dtype=torch.int64) for _ in range(2))
    return place, back, chosen.new_empty(experts, dtype=torch.int32)


class Compute(Protocol):
    """Runs the experts on sorted tokens [N, hidden], given each expert's end; optionally times weights [N, 1]."""

    def __call__(self, tokens: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor: ...


class Mix(Protocol):
    """Sums the experts' outputs of sorted tokens per token: [T, hidden]."""

    def __call__(self, results: Tensor, weights: Tensor, order: Order) -> Tensor: ...


class Routed(NamedTuple):
    """Tokens with their routing, for all tokens on this rank."""

    x: Tensor  # [B, T, hidden], as shared experts read them
    weights: Tensor  # [B·T, active], in the compute dtype
    chosen: Tensor  # int64 [B·T, active]
    order: Order  # as set by ``Dispatcher``


# Tokens in transit, one tensor for each part.
TokensInTransit = tuple[Tensor, ...]


class PendingDispatch(Protocol):
    """Tokens in transit to their experts."""

    def mixed(
        self, arriving: TokensInTransit, compute: Compute, weights: Tensor, order: Order, mix: Mix
    ) -> Tensor:
        """The weighted sum of the experts' outputs per token: [T, hidden], in the width that was sent."""


class Dispatcher(Protocol):
    """Dispatch: how tokens reach their experts."""

    def leaving(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Order]:
        """Copies of tokens [T, hidden] for experts [T, active], and their order; shapes do not depend on routing."""

    def send(self, tokens: Tensor, routed: Routed) -> tuple[TokensInTransit, PendingDispatch]:
        """Start sending; received tokens are available only when outputs are requested."""

    def incoming(self, mixed: Tensor) -> Tensor:
        """[T, hidden] from the sums that came back."""


class LocalDispatcher:
    """All experts are on this rank."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def leaving(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Order]:
        return spread_by_expert(x, chosen, self.experts)

    def send(self, tokens: Tensor, routed: Routed) -> tuple[TokensInTransit, PendingDispatch]:
        return (tokens,), LocalTokens(routed.order.ends)

    def incoming(self, mixed: Tensor) -> Tensor:
        return mixed


class LocalTokens:
    """Tokens that stay on this rank."""

    def __init__(self, ends: Tensor) -> None:
        self.ends = ends

    def mixed(
        self, arriving: TokensInTransit, compute: Compute, weights: Tensor, order: Order, mix: Mix
    ) -> Tensor:
        (tokens,), copies = arriving, weights.shape[1]
        own = Permute.apply(weights.reshape(-1, 1), order.place, order.back)
        mixed: Tensor = Collect.apply(compute(tokens, self.ends, own), copies, order.place, order.back)
        return mixed


def spread_by_expert(x: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Order]:
    """A copy of each token [T, width] for each of its experts, sorted by expert."""
    order = by_expert(chosen.flatten(), experts)
    tokens: Tensor = Spread.apply(x, chosen.shape[1], order.place, order.back)
    return tokens, order


class GroupedLinear(nn.Module):
    """One projection of all experts, or ``each`` of them stacked: [each·experts, out, in].

    y = x·Wᵀ with the matrices of each token's expert, [N, each·out].
    """

    def __init__(self, experts: int, inputs: int, outputs: int, each: int = 1) -> None:
        super().__init__()
        self.weight, self.each = nn.Parameter(torch.empty(each * experts, outputs, inputs)), each

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        matrices = self.matrices(x.dtype)
        return (packed_product if matrices.dtype == PACKED else product)(x, matrices, ends)

    def matrices(self, dtype: torch.dtype) -> Tensor:
        """One matrix for each expert: [experts, each·out, in]. 4-bit ones stay packed."""
        weight = self.weight if self.weight.dtype == PACKED else self.weight.to(dtype)
        return weight.unflatten(0, (-1, self.each)).flatten(1, 2)


class RoutedExperts(nn.Module):
    """The routed experts of a layer, or those of them on this rank."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.experts is not None
        count, width = model.experts.count, model.experts.ffn
        self.gate_up_proj = GroupedLinear(count, model.hidden, width, each=2)
        self.down_proj = GroupedLinear(count, width, model.hidden)
        self.activation = model.activation

    def forward(
        self, arriving: TokensInTransit, sent: PendingDispatch, weights: Tensor, order: Order
    ) -> Tensor:
        """Tokens in transit, weights [T, active] of all that were sent → weighted sums of the outputs [T, hidden].

        Everything happens inside this function because FSDP gathers weights around it, and recognises a recomputed
        forward pass by the gradient that reached its output: nothing after it may be the first to need what is
        computed in it.
        """
        return sent.mixed(arriving, self.compute, weights, order, mix)

    def compute(self, tokens: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
        """As ``Compute``."""
        gate_up = self.gate_up_proj(tokens, ends)
        return way_out(gate_up, self.down_proj.matrices(tokens.dtype), ends, self.activation, weights)


def mix(results: Tensor, weights: Tensor, order: Order) -> Tensor:
    mixed: Tensor = _Mix.apply(results, weights, order.place, order.back)
    return mixed


class MixtureOfExperts(nn.Module):
    """A router, its routed experts, and the shared experts that every token uses."""

    def __init__(self, model: Model, losses: RouterLosses) -> None:
        super().__init__()
        assert model.experts is not None
        self.gate = Router(model, losses)
        self.experts = RoutedExperts(model)
        self.count = model.experts.count
        self.shared_experts = MLP(model, model.experts.shared_ffn) if model.experts.shared else None
        self.travel: Dispatcher = LocalDispatcher(self.count)
        # Hooks for tensor ranks that split features: all tokens in, with their routing, and the sum of all ranks'
        # outputs out.
        self.enter: Callable[[Tensor, Routing], tuple[Tensor, Routing]] = _as_they_are
        self.leave: Callable[[Tensor], Tensor] = _as_it_is

    def forward(self, x: Tensor, positions: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """``positions``, ``noise``: of all tokens, for adapters of shared experts."""
        tokens, routed = self.route(x)
        arriving, sent = self.travel.send(tokens, routed)
        del tokens  # free their memory once sent
        # Computed while tokens travel and, since autograd runs in reverse, while their gradients do.
        shared = None if self.shared_experts is None else self.shared_experts(routed.x, positions, noise)
        return self.sum(routed.x, self.experts(arriving, sent, routed.weights, routed.order), shared)

    def route(self, x: Tensor) -> tuple[Tensor, Routed]:
        """Route tokens and prepare them for dispatch."""
        x, routing = self.enter(x, self.gate(x))
        weights, chosen = (part.flatten(0, 1) for part in routing)
        tokens, order = self.travel.leaving(x.flatten(0, 1), chosen)
        return tokens, Routed(x, weights.to(x.dtype), chosen, order)

    def sum(self, x: Tensor, mixed: Tensor, shared: Tensor | None) -> Tensor:
        """Add the outputs of routed and shared experts for tokens x."""
        mixed = self.travel.incoming(mixed).view_as(x)
        return self.leave(mixed if shared is None else mixed + shared)


def _as_they_are(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    return x, routing


def _as_it_is(mixed: Tensor) -> Tensor:
    return mixed


class Spread(torch.autograd.Function):
    """A copy of each token [T, width] for each of its k experts, sorted: [T·k, width]. Backward: their sum.

    Fewer copies if ``place`` has fewer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int, place: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return spread_rows(x, place, back, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return mix_rows(gradient, back, ctx.copies), None, None, None


class Collect(torch.autograd.Function):
    """The sum of each token's expert outputs; backward, a copy of its gradient for each."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, copies: int, place: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(place, back)
        ctx.copies = copies
        return mix_rows(results, back, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        place, back = ctx.saved_tensors
        return spread_rows(gradient, place, back, ctx.copies), None, None, None


class _Mix(torch.autograd.Function):
    """The weighted sum of sorted outputs [T·k, width] per token: [T, width]."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, weights: Tensor, place: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(results, weights, place, back)
        return mix_rows(results, back, weights.shape[1], weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        results, weights, place, back = ctx.saved_tensors
        spread = spread_rows(gradient, place, back, weights.shape[1])
        of_weights = _values_at((results * spread).sum(-1), back).view_as(weights)
        return spread.mul_(weights.flatten().index_select(0, place)[:, None]), of_weights, None, None


def _values_at(values: Tensor, places: Tensor) -> Tensor:
    """Values at these places, with 0 for places past the end."""
    if len(values) < len(places):
        return nn.functional.pad(values, (0, 1)).index_select(0, places.clamp(max=len(values)))
    return values.index_select(0, places)


class Permute(torch.autograd.Function):
    """Reorder rows; the backward pass restores the order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None
