"""Compile a block whose experts are on several ranks in parts, around the token exchange.

A rank learns how many tokens it receives only when they arrive, and the host has to read that number, so no graph can
span it. Each of these is therefore one graph, shared by all layers: attention, router and the sorting of tokens; shared
experts; routed experts, for any number of tokens; their results, put back in place and summed; the rest of the block.

Each part saves for its backward pass what the layout's recomputation keeps, plus its own inputs: exchanges are not
repeated. ``full`` keeps only the block's input, so there the parts run again, exchanges included, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.facts.layout import Recompute
from shoal.models.decoder import Block
from shoal.models.documents import Documents
from shoal.models.experts import (
    LocalDispatcher,
    MixtureOfExperts,
    Order,
    PendingDispatch,
    Routed,
    RoutedExperts,
    TokensInTransit,
    mix,
)

# Runs a module's function, its first argument, as a graph; the kind says what the graph keeps.
Graph = Callable[..., Any]
# The compiler treats sizes 0 and 1 as constants: each would be a graph of its own, and so few tokens need none.
FEWEST_TOKENS = 2


def exchanges(block: nn.Module) -> bool:
    """Whether the block exchanges tokens with other ranks."""
    mixture = block.mlp
    return isinstance(mixture, MixtureOfExperts) and not isinstance(mixture.travel, LocalDispatcher)


class InParts:
    """Replaces a block's forward."""

    def __init__(self, block: nn.Module, graph: Graph, kind: Recompute) -> None:
        assert isinstance(block, Block) and isinstance(block.mlp, MixtureOfExperts)
        self.block, self.mixture, self.graph = block, block.mlp, graph
        self.again = kind == "full"
        self.kind: Recompute = "none" if self.again else kind
        # Called inside the experts' forward, so that hooks that gather weights stay outside. Eager unless called from
        # here.
        self.compiled_experts = False
        self.met: set[bool] = set()  # with or without gradients: cases that have a graph of the experts
        experts: nn.Module = self.mixture.experts
        self.eager_experts = experts.forward
        experts.forward = self._experts

    def __call__(self, *arguments: Any) -> Tensor:
        if not self.again:
            return self._forward(*arguments)
        output: Tensor = checkpoint(self._forward, *arguments, use_reentrant=False, preserve_rng_state=False)
        return output

    def _forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        positions: Tensor,
        documents: Documents | None,
        noise: Tensor | None,
    ) -> Tensor:
        mixture, graph, kind = self.mixture, self.graph, self.kind
        after, tokens, x, weights, chosen, *sorting = graph(
            kind, _before, self.block, hidden, rotation, positions, documents, noise
        )
        order = Order(*sorting)
        arriving, sent = mixture.travel.send(tokens, Routed(x, weights, chosen, order))
        del tokens
        shared = None
        if mixture.shared_experts is not None:
            shared = graph(
                kind, type(mixture.shared_experts).forward, mixture.shared_experts, x, positions, noise
            )
        self.compiled_experts = True
        try:
            mixed = mixture.experts(arriving, sent, weights, order)
        finally:
            self.compiled_experts = False
        behind = self.block, after, x, mixed, shared, positions, noise
        # A graph would keep something and need it before the gradient reaches the experts: see their forward.
        output: Tensor = _behind(*behind) if self.again else graph(kind, _behind, *behind)
        return output

    def _experts(
        self, arriving: TokensInTransit, sent: PendingDispatch, weights: Tensor, order: Order
    ) -> Tensor:
        if not self.compiled_experts:
            return self.eager_experts(arriving, sent, weights, order)
        return sent.mixed(arriving, self._compute, weights, order, self._mix)

    def _mix(self, results: Tensor, weights: Tensor, order: Order) -> Tensor:
        mixed: Tensor = self.graph(self.kind, _mixed, self.mixture.experts, results, weights, *order)
        return mixed

    def _compute(self, tokens: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
        assert weights is None  # they stayed where the tokens came from
        if tokens.shape[0] >= FEWEST_TOKENS:
            return self._compute_compiled(tokens, ends)
        if torch.is_grad_enabled() not in self.met:
            # All ranks now agree on this block's fate, so each needs a graph, if only of dummy tokens.
            made_up = tokens.new_zeros(FEWEST_TOKENS, tokens.shape[1]).requires_grad_(tokens.requires_grad)
            self._compute_compiled(made_up, torch.full_like(ends, FEWEST_TOKENS))
        return self.mixture.experts.compute(tokens, ends)

    def _compute_compiled(self, tokens: Tensor, ends: Tensor) -> Tensor:
        self.met.add(torch.is_grad_enabled())
        torch._dynamo.mark_dynamic(tokens, 0)
        made: Tensor = self.graph(self.kind, RoutedExperts.compute, self.mixture.experts, tokens, ends)
        return made


def _before(
    block: Block,
    hidden: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    documents: Documents | None,
    noise: Tensor | None,
) -> tuple[Tensor, ...]:
    assert isinstance(block.mlp, MixtureOfExperts)
    after, read = block.attended(hidden, rotation, positions, documents, noise)
    tokens, (x, weights, chosen, order) = block.mlp.route(read)
    return after, tokens, x, weights, chosen, *order


def _mixed(experts: RoutedExperts, results: Tensor, weights: Tensor, *order: Tensor) -> Tensor:
    return mix(results, weights, Order(*order))


def _behind(
    block: Block,
    after: Tensor,
    x: Tensor,
    mixed: Tensor,
    shared: Tensor | None,
    positions: Tensor,
    noise: Tensor | None,
) -> Tensor:
    assert isinstance(block.mlp, MixtureOfExperts)
    return block.added(after, block.mlp.sum(x, mixed, shared), positions, noise)
