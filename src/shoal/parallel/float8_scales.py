"""fp8 matmuls (``recipe.precision = "fp8"``) for the projections of blocks, with the scales of their weights.

A weight is quantised by the largest absolute value of the whole weight, whichever ranks hold its parts, so that every
layout rounds it alike. The maximum is computed once per step, after the update: over the local part, then over the
ranks that hold the rest, all projections in one message. Embeddings, norms, biases and the head stay in bf16: the
head's errors would go straight into the loss, and the others are not matmuls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.facts.layout.buckets import even_share
from shoal.facts.layout.float8 import ScaleSlot, scale_slots
from shoal.facts.layout.parameter_groups import placement
from shoal.facts.recipe import Scaling
from shoal.models.float8 import PRECISE, Float8Product, WeightScales, largest, scale_of
from shoal.models.linear import Linear
from shoal.parallel.mesh import Mesh


class _Noted(NamedTuple):
    """Where one weight's maxima, by row or by column, are stored."""

    start: int
    slot: ScaleSlot


class Float8Scales:
    """The scales of all weights that a rank multiplies in fp8."""

    def __init__(self, blocks: list[nn.Module], scaling: Scaling, mesh: Mesh, sharded: bool) -> None:
        """The blocks have left the meta device. ``sharded``: this rank holds some rows of each weight (FSDP)."""
        self.scaling, self.sharded, self.mesh = scaling, sharded, mesh
        layout = mesh.layout
        self.ranks = placement(layout.tp, layout.cp, layout.fsdp, layout.dp).sharded
        self.shards = mesh.group_of(self.ranks)
        self.linears = [child for block in blocks for child in block.modules() if isinstance(child, Linear)]
        product = Float8Product(scaling)
        sizes: dict[bool, int] = {True: 0, False: 0}
        noted: list[list[_Noted]] = []
        for linear in self.linears:
            linear.product = product
            by_input = linear.reduce is not None  # how tensor ranks split the weight
            outputs, inputs = linear.weight.shape
            slots = scale_slots(scaling, outputs, inputs, by_input)
            noted.append([_noted(sizes, slot) for slot in slots])
        self.most = {over: torch.zeros(size, device=mesh.device) for over, size in sizes.items()}
        self.scales = {over: torch.zeros_like(most) for over, most in self.most.items()}
        # Computed once and not in every step: where each weight's maxima are stored.
        self.parts = [[self._view(self.most, one) for one in ones] for ones in noted]
        for linear, ones in zip(self.linears, noted, strict=True):
            linear.weight_scales = WeightScales(*(self._view(self.scales, one) for one in ones))

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the scales after the weights have changed."""
        for most in self.most.values():
            most.zero_()
        if self.scaling == "tensorwise":
            self._note_tensors()
        else:
            for linear, parts in zip(self.linears, self.parts, strict=True):
                self._note_rows(linear.weight, *parts)
        for over_tp, most in self.most.items():
            # bf16 values are what gets quantised: working copies, or what FSDP gathers from wider shards.
            most.copy_(most.bfloat16())
            groups = [self.shards if self.sharded else None, self.mesh.group("tp") if over_tp else None]
            for group in groups:
                if group is not None and most.numel():
                    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            self.scales[over_tp].copy_(scale_of(most, PRECISE))

    def _note_tensors(self) -> None:
        """Maxima of all weights in a few kernels: hundreds of small ones would keep the host from running ahead."""
        held = [_local(linear.weight) for linear in self.linears]
        some = [(weight, parts[0]) for weight, parts in zip(held, self.parts, strict=True) if weight.numel()]
        if some:
            weights, parts = zip(*some, strict=True)
            torch._foreach_copy_(list(parts), torch._foreach_norm(list(weights), torch.inf))

    def _note_rows(self, weight: Tensor, forward: Tensor, backward: Tensor) -> None:
        held, first = _local(weight), self._first_row(weight)
        if held.numel():
            forward[first : first + len(held)] = largest(held, self.scaling)
            backward.copy_(largest(held.T, self.scaling))

    def _first_row(self, weight: Tensor) -> int:
        """The first row of this rank's part of a weight."""
        if not isinstance(weight, DTensor):
            return 0
        return self.mesh.index_in(self.ranks) * even_share(weight.shape[0], self.ranks.size)

    def _view(self, of: dict[bool, Tensor], noted: _Noted) -> Tensor:
        found = of[noted.slot.over_tp][noted.start : noted.start + noted.slot.values]
        return found.view(()) if self.scaling == "tensorwise" else found.view(-1, 1)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _noted(sizes: dict[bool, int], slot: ScaleSlot) -> _Noted:
    start = sizes[slot.over_tp]
    sizes[slot.over_tp] += slot.room
    return _Noted(start, slot)
