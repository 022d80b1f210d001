"""What the routers of all layers did in a step: tokens sent to each expert, and the routers' losses."""

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

LOSSES = 2  # columns after the experts': the balance loss and the z-loss


@dataclass(frozen=True)
class ExpertLoad:
    """Expert load of the global batch, the same in every layout."""

    sent: tuple[tuple[int, ...], ...]  # per MoE layer: tokens sent to each expert
    balance: float  # summed over sequences and layers
    z: float  # summed over tokens and layers

    @property
    def per_expert(self) -> list[int]:
        """Tokens per expert, summed over layers."""
        return [sum(layer) for layer in zip(*self.sent, strict=True)]

    @property
    def imbalance(self) -> float:
        """The largest ratio, over all layers and experts, of an expert's tokens to an even share."""
        return max(max(layer) * len(layer) / max(1, sum(layer)) for layer in self.sent)


class RouterTally:
    """Counts for this rank's routers, by layer."""

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
        # Without sequence parallelism all ranks of a tensor group see the same tokens, so only one of them counts.
        self.speaks = mesh.layout.sp or mesh.coords["tp"] == 0
        for router in self.routers.values():
            router.prepare(mesh.device)

    def start_step(self, scale: float) -> None:
        """``scale``: what the loss is multiplied by, besides the factor that makes it a mean."""
        for router in self.routers.values():
            router.start_step(scale)

    def seen(self) -> Tensor:
        """This rank's counts, flattened from ``shape``; zero for layers of other ranks. To be summed over all ranks."""
        found = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        for number, router in self.routers.items():
            if self.speaks and router.tally.grad is not None:
                found[number] = router.tally.grad
        return found.flatten()

    @torch.no_grad()
    def balance(self, pieces: list[Shard], summed: Tensor, rate: float, refused: Tensor) -> None:
        """Raise the bias corrections of experts that got fewer tokens than average, and lower the others'.

        ``summed``: the counts of all ranks. If the step is refused, nothing changes.
        """
        counts = summed.view(self.shape)[:, :-LOSSES]
        for piece in pieces:
            if piece.name.endswith(CORRECTION):
                of_layer = counts[self.rows[piece.name.split(".")[2]]]
                wanted = (of_layer.mean() - of_layer).sign()[piece.start : piece.stop]
                piece.tensor.add_((wanted * rate).masked_fill(refused, 0.0).to(piece.tensor.dtype))

    def load(self, summed: Sequence[float]) -> ExpertLoad | None:
        """The load from the counts summed over all ranks; None if the model has no experts."""
        if not summed:
            return None
        width = self.shape[1]
        rows = [summed[start : start + width] for start in range(0, len(summed), width)]
        sent = tuple(tuple(round(count) for count in row[:-LOSSES]) for row in rows)
        return ExpertLoad(sent, math.fsum(row[-2] for row in rows), math.fsum(row[-1] for row in rows))
