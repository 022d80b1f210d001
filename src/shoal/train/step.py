"""One training step: forward, backward, sum over ranks, clip, update. The same in every layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shoal.facts.recipe import Recipe
from shoal.models.random import key
from shoal.parallel.apply import Placed
from shoal.parallel.mesh import Mesh
from shoal.train.data.loader import Batch
from shoal.train.optimizer import LossScale, clip
from shoal.train.schedule import learning_rate


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank."""

    loss: float  # mean over the target tokens of the whole global batch
    grad_norm: float
    lr: float
    updated: bool  # False: a gradient was not finite and the weights were left alone


class Step:
    """Owns what changes the weights: the placed network, its optimizer and the loss scale."""

    def __init__(
        self, placed: Placed, optimizer: torch.optim.Optimizer, recipe: Recipe, mesh: Mesh, scale: LossScale
    ) -> None:
        self.placed = placed
        self.optimizer = optimizer
        self.recipe = recipe
        self.mesh = mesh
        self.scale = scale
        self.parameters = list(placed.network.parameters())

    def __call__(self, step: int, micro_batches: list[Batch], targets: int) -> StepResult:
        """Work through this rank's micro-batches of one step.

        ``targets`` counts the target tokens of the global batch. Every micro-batch's summed loss is divided by it
        before the backward pass, so that gradients only ever need adding up: over micro-batches, over ranks,
        however unevenly tokens are spread over them.
        """
        loss = self._gradients(step, micro_batches, max(1, targets))  # a batch may have nothing to predict
        norm = clip(self.parameters, self.recipe.clip, self.scale.value)
        updated = math.isfinite(norm)
        lr = learning_rate(self.recipe, step)
        if updated:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.scale.update(overflow=not updated)
        return StepResult(loss, norm, lr, updated)

    def _gradients(self, step: int, micro_batches: list[Batch], targets: int) -> float:
        """Leave the global batch's gradients in place, times the loss scale; return its mean loss."""
        replicate, network = self.placed.replicate, self.placed.network
        if replicate is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            replicate.start_step()
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for number, batch in enumerate(micro_batches, start=1):
            if replicate is not None:
                replicate.last_micro_batch = number == len(micro_batches)
            hidden = network(batch.tokens, batch.positions, batch.documents, self._noise(step, batch))
            loss_sum, _ = network.lm_head(hidden, batch.targets)
            (loss_sum * (self.scale.value / targets)).backward()
            total += loss_sum.detach()
        if replicate is not None:
            replicate.finish_step()
        return self.mesh.sum_floats([float(total)])[0] / targets

    def _noise(self, step: int, batch: Batch) -> torch.Tensor | None:
        """One key a sequence for its dropout masks: a hash of (seed, step, its place in the global batch)."""
        if self.recipe.dropout == 0:
            return None
        keys = [key(self.recipe.seed, step, f"row {row}") for row in batch.rows.tolist()]
        return torch.tensor(keys, dtype=torch.int64, device=self.mesh.device)
