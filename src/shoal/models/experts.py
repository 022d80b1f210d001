"""A mixture of experts in place of an MLP: each token goes to a few of many small MLPs, and none is dropped.

Tokens are sorted by expert, so that every expert's are one after the other, and multiplied with all experts' matrices
in one grouped product. Their results go back to their places and are added up, each with its weight. Copying and adding
up are functions of autograd of their own: torch's would add gradients of the same token in any order on a GPU.
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
    """Where tokens are that were sorted by expert. Of T tokens with k experts each there are T·k."""

    place: Tensor  # int64 [T·k]: which of the unsorted ones each of them is
    back: Tensor  # int64 [T·k]: where each of the unsorted ones is
    ends: Tensor  # int32 [experts]: where each expert's tokens end

    def first(self, number: int) -> Order:
        """Without what was sorted behind them, for it is not there: ``back`` tells of that a place past the end."""
        return self._replace(place=self.place[:number].clone())

    def part(self, unsorted: slice, ordered: slice) -> Order:
        """Of these alone, which were sorted to there; some behind all others, and these are not there. ``ends`` stay
        those of the whole.
        """
        place, back = self.place[ordered] - unsorted.start, self.back[unsorted] - ordered.start
        return self._replace(place=place, back=back)


def by_expert(chosen: Tensor, experts: int) -> Order:
    """``chosen``: of each token, or of each of its copies, the expert, in one dimension; ``experts``: none of them."""
    return Order(*sort_by_expert(chosen, experts))


@torch.library.custom_op("shoal::sort_by_expert", mutates_args=())
def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As ``Order``. An operator, so that compiled blocks can keep what it gives, which is little, under its name."""
    # In 16 bits, which a GPU sorts in half the time of 64.
    ordered, place = chosen.to(torch.int16).sort(stable=True)
    back = torch.empty_like(place).scatter_(0, place, torch.arange(place.numel(), device=place.device))
    numbers = torch.arange(experts, dtype=torch.int16, device=chosen.device)
    return place, back, torch.searchsorted(ordered, numbers, right=True, out_int32=True)


@sort_by_expert.register_fake
def _unsorted(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    place, back = (chosen.new_empty(chosen.shape, dtype=torch.int64) for _ in range(2))
    return place, back, chosen.new_empty(experts, dtype=torch.int32)


class Compute(Protocol):
    """What experts make of their tokens: [N, hidden], sorted, with the ends of each expert's; times weights [N, 1]."""

    def __call__(self, tokens: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor: ...


class Mix(Protocol):
    """What experts made of sorted tokens, added up: [T, hidden]."""

    def __call__(self, results: Tensor, weights: Tensor, order: Order) -> Tensor: ...


class Routed(NamedTuple):
    """Tokens with their routing, all that are here."""

    x: Tensor  # [B, T, hidden], as experts that every token uses read them
    weights: Tensor  # [B·T, active], in the compute dtype
    chosen: Tensor  # int64 [B·T, active]
    order: Order  # as ``Travel`` has put them


# Tokens on their way, in as many parts as they travel in.
Arriving = tuple[Tensor, ...]


class Sent(Protocol):
    """Tokens on their way to their experts."""

    def mixed(self, arriving: Arriving, compute: Compute, weights: Tensor, order: Order, mix: Mix) -> Tensor:
        """What experts made of them, each with its weight, added up: [T, hidden], as much of each as was sent."""


class Travel(Protocol):
    """How tokens reach their experts."""

    def leaving(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Order]:
        """What is sent of tokens [T, hidden] with experts [T, active], and its order. Whatever the numbers, of the
        same shape.
        """

    def send(self, tokens: Tensor, routed: Routed) -> tuple[Arriving, Sent]:
        """Begin to send; what arrives is not there before results are asked for."""

    def incoming(self, mixed: Tensor) -> Tensor:
        """[T, hidden] of what has come back and was added up."""


class AllHere:
    """Every expert is on this rank."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def leaving(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Order]:
        return spread_by_expert(x, chosen, self.experts)

    def send(self, tokens: Tensor, routed: Routed) -> tuple[Arriving, Sent]:
        return (tokens,), Here(routed.order.ends)

    def incoming(self, mixed: Tensor) -> Tensor:
        return mixed


class Here:
    """Tokens that need not travel."""

    def __init__(self, ends: Tensor) -> None:
        self.ends = ends

    def mixed(self, arriving: Arriving, compute: Compute, weights: Tensor, order: Order, mix: Mix) -> Tensor:
        (tokens,), copies = arriving, weights.shape[1]
        own = Permute.apply(weights.reshape(-1, 1), order.place, order.back)
        mixed: Tensor = Collect.apply(compute(tokens, self.ends, own), copies, order.place, order.back)
        return mixed


def spread_by_expert(x: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Order]:
    """A copy of each token [T, width] for each of its experts, sorted by these."""
    order = by_expert(chosen.flatten(), experts)
    tokens: Tensor = Spread.apply(x, chosen.shape[1], order.place, order.back)
    return tokens, order


class GroupedLinear(nn.Module):
    """One projection of all experts, or ``each`` of them one behind the other: [each·experts, out, in].

    y = x·Wᵀ with the matrices of each token's expert, [N, each·out].
    """

    def __init__(self, experts: int, inputs: int, outputs: int, each: int = 1) -> None:
        super().__init__()
        self.weight, self.each = nn.Parameter(torch.empty(each * experts, outputs, inputs)), each

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        matrices = self.matrices(x.dtype)
        return (packed_product if matrices.dtype == PACKED else product)(x, matrices, ends)

    def matrices(self, dtype: torch.dtype) -> Tensor:
        """One for each expert: [experts, each·out, in]. Those in 4 bits are as they rest."""
        weight = self.weight if self.weight.dtype == PACKED else self.weight.to(dtype)
        return weight.unflatten(0, (-1, self.each)).flatten(1, 2)


class RoutedExperts(nn.Module):
    """All experts of a layer that a router sends tokens to, or those of them that are here."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.experts is not None
        count, width = model.experts.count, model.experts.ffn
        self.gate_up_proj = GroupedLinear(count, model.hidden, width, each=2)
        self.down_proj = GroupedLinear(count, width, model.hidden)
        self.activation = model.activation

    def forward(self, arriving: Arriving, sent: Sent, weights: Tensor, order: Order) -> Tensor:
        """Tokens on their way here, weights [T, active] of all that were sent → their results, added up [T, hidden].

        All of it is here because FSDP gathers weights around this function, and knows a repeated forward pass by the
        gradient that has reached its end: nothing behind it may be the first to need what is computed in it.
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
    """A router, the experts that it sends tokens to, and those that every token uses."""

    def __init__(self, model: Model, losses: RouterLosses) -> None:
        super().__init__()
        assert model.experts is not None
        self.gate = Router(model, losses)
        self.experts = RoutedExperts(model)
        self.count = model.experts.count
        self.shared_experts = MLP(model, model.experts.shared_ffn) if model.experts.shared else None
        self.travel: Travel = AllHere(self.count)
        # Where ranks split features: all tokens in, with their routing, and the sum of all ranks' results out.
        self.enter: Callable[[Tensor, Routing], tuple[Tensor, Routing]] = _as_they_are
        self.leave: Callable[[Tensor], Tensor] = _as_it_is

    def forward(self, x: Tensor, positions: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """``positions``, ``noise``: those of all tokens, for adapters of experts that every token uses."""
        tokens, routed = self.route(x)
        arriving, sent = self.travel.send(tokens, routed)
        del tokens  # what has left takes no room
        # While tokens travel; and, since autograd goes the same way backwards, while their gradients do.
        shared = None if self.shared_experts is None else self.shared_experts(routed.x, positions, noise)
        return self.sum(routed.x, self.experts(arriving, sent, routed.weights, routed.order), shared)

    def route(self, x: Tensor) -> tuple[Tensor, Routed]:
        """Tokens as they leave for their experts."""
        x, routing = self.enter(x, self.gate(x))
        weights, chosen = (part.flatten(0, 1) for part in routing)
        tokens, order = self.travel.leaving(x.flatten(0, 1), chosen)
        return tokens, Routed(x, weights.to(x.dtype), chosen, order)

    def sum(self, x: Tensor, mixed: Tensor, shared: Tensor | None) -> Tensor:
        """What routed experts made of tokens x, and what the experts that every token uses did."""
        mixed = self.travel.incoming(mixed).view_as(x)
        return self.leave(mixed if shared is None else mixed + shared)


def _as_they_are(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    return x, routing


def _as_it_is(mixed: Tensor) -> Tensor:
    return mixed


class Spread(torch.autograd.Function):
    """A copy of each token [T, width] for each of its k experts, sorted: [T·k, width]. Backward: the sum of them.

    There are fewer copies where ``place`` has fewer.
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
    """The sum of what became of each token's copies; backward, a copy of its gradient for each."""

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
    """Results of sorted tokens [T·k, width] back to their places, each with its weight, added up: [T, width]."""

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
    """0 at places past the end."""
    if len(values) < len(places):
        return nn.functional.pad(values, (0, 1)).index_select(0, places.clamp(max=len(values)))
    return values.index_select(0, places)


class Permute(torch.autograd.Function):
    """Rows in another order; its backward pass puts them back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None
