"""What the routers of all layers did in a step: how many tokens they sent to each expert, and their losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.facts.model import Model
from shoal.facts.model.parameters import CORRECTION
from shoal.models.router import Router
from shoal.parallel.experts import mixtures
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import Shard
from shoal.parallel.stage_module import StageModule

LOSSES = 2  # after the experts' numbers: the balance and z


@dataclass(frozen=True)
class ExpertLoad:
    """Of the global batch, the same in every layout."""

    sent: tuple[tuple[int, ...], ...]  # of every layer with experts: tokens that each expert was sent
    balance: float  # summed over sequences and layers
    z: float  # summed over tokens and layers

    @property
    def per_expert(self) -> list[int]:
        """All layers together."""
        return [sum(layer) for layer in zip(*self.sent, strict=True)]

    @property
    def imbalance(self) -> float:
        """How many times an even share the busiest expert of any layer had."""
        return max(max(layer) * len(layer) / max(1, sum(layer)) for layer in self.sent)


class RouterTally:
    """This rank's routers, by the layers they are in."""

    def __init__(self, segments: list[StageModule], model: Model, mesh: Mesh) -> None:
        layers = [layer for layer in range(model.layers) if model.has_experts(layer)]
        self.rows = {str(layer): number for number, layer in enumerate(layers)}
        self.routers: dict[int, Router] = {
            self.rows[name]: mixture.gate
            for segment in segments
            for name, block in segment.network.model.layers.items()
            for mixture in mixtures(block)
        }
        self.device = mesh.device
        self.shape = (len(layers), model.experts.count + LOSSES if model.experts else 0)
        # Without sequence parallelism all ranks of a tensor group see the same tokens: one of them speaks for all.
        self.speaks = mesh.layout.sp or mesh.coords["tp"] == 0
        for router in self.routers.values():
            router.prepare(mesh.device)

    def start_step(self, scale: float) -> None:
        """``scale``: what the loss is multiplied by, beside what makes a mean of it."""
        for router in self.routers.values():
            router.start_step(scale)

    def seen(self) -> Tensor:
        """All that was counted here, row by row of ``shape``; zero for layers of other ranks. To be summed over all."""
        found = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        for number, router in self.routers.items():
            if self.speaks and router.tally.grad is not None:
                found[number] = router.tally.grad
        return found.flatten()

    @torch.no_grad()
    def balance(self, pieces: list[Shard], summed: Tensor, rate: float, refused: Tensor) -> None:
        """Move the corrections of experts that were sent fewer tokens than others up, and of the rest down.

        ``summed``: what all ranks have seen. Where the step is refused, nothing moves.
        """
        counts = summed.view(self.shape)[:, :-LOSSES]
        for piece in pieces:
            if piece.name.endswith(CORRECTION):
                of_layer = counts[self.rows[piece.name.split(".")[2]]]
                wanted = (of_layer.mean() - of_layer).sign()[piece.start : piece.stop]
                piece.tensor.add_((wanted * rate).masked_fill(refused, 0.0).to(piece.tensor.dtype))

    def load(self, summed: Sequence[float]) -> ExpertLoad | None:
        """From the sum over all ranks; None where the model has no experts."""
        if not summed:
            return None
        width = self.shape[1]
        rows = [summed[start : start + width] for start in range(0, len(summed), width)]
        sent = tuple(tuple(round(count) for count in row[:-LOSSES]) for row in rows)
        return ExpertLoad(sent, math.fsum(row[-2] for row in rows), math.fsum(row[-1] for row in rows))
