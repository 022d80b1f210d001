"""One training step: forward, backward, reduce, clip, update; the same in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.facts.model.parameters import CORRECTION
from shoal.facts.recipe import Recipe
from shoal.models.random import key
from shoal.parallel.apply import Placed
from shoal.parallel.mesh import Mesh
from shoal.parallel.router_tally import ExpertLoad
from shoal.parallel.shards import gradient
from shoal.parallel.stage_module import MicroBatch
from shoal.parallel.strict import strict_loss, strict_norm
from shoal.train.data.loader import Batch
from shoal.train.optimizer import LossScale, clip_and_update, learning_rate, squared_norm, unscale


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank."""

    loss: float  # mean over the target tokens of the whole global batch
    grad_norm: float
    lr: float
    updated: bool  # False: a gradient was not finite and the weights were left alone
    blamed: tuple[int, ...] = ()  # the ranks that it came from, where that can be told
    experts: ExpertLoad | None = None  # None: the model has none


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
        self.pieces = placed.gradients.pieces
        self._routed: Tensor = torch.empty(0)  # what all routers did, see ``RouterTally``
        self.corrected = any(piece.name.endswith(CORRECTION) for piece in self.pieces)
        # Called before the weights change: the last moment for background readers to finish.
        self.before_update: Callable[[], None] = lambda: None
        # Gradients of a larger norm do not reach the weights. It must answer alike on all ranks.
        self.refuse_above: Callable[[], float] = lambda: math.inf

    def __call__(self, step: int, batches: list[Batch], targets: int) -> StepResult:
        """Work through this rank's micro-batches of one step.

        ``targets`` counts the target tokens of the global batch. Every micro-batch's summed loss is divided by it
        before the backward pass, so that gradients only ever need adding up: over micro-batches, over ranks,
        however unevenly tokens are spread over them.
        """
        return self.update(step, self.compute_gradients(step, batches, targets))

    def agree(self, targets: int, stop: bool = False) -> tuple[int, bool]:
        """One small sum tells every rank how many targets the step has, and whether any rank was asked to stop."""
        total, asking = self.mesh.hosts.sum_integers([targets, int(stop)])
        return total, asking > 0

    def compute_gradients(self, step: int, batches: list[Batch], targets: int) -> Tensor:
        """Leave the global batch's gradients with the pieces; return its mean loss and their norm, on the device."""
        placed = self.placed
        targets = max(1, targets)  # a batch may have nothing to predict
        micro_batches = [self._micro_batch(step, batch) for batch in batches]
        placed.gradients.start_step()
        losses = placed.executor.forward_backward(micro_batches, self.scale.value / targets, self.scale.value)
        placed.gradients.finish_step()
        if placed.exact is not None:
            placed.exact.deliver(self.recipe.batch)
        placed.shared.sum(self.pieces)
        unscale(self.pieces, self.scale.value)
        loss, norm = self._measure(losses)
        return torch.stack([loss / targets, norm])

    def update(self, step: int, measured: Tensor) -> StepResult:
        """Clip the gradients and move the weights, unless a gradient is not finite.

        All of it is given to the device before its numbers are read, which waits for it.
        """
        lr, most = learning_rate(self.recipe, step), self.refuse_above()
        self.before_update()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        clip_and_update(self.optimizer, self.pieces, measured[1], self.recipe.clip, most)
        if self.corrected:
            refused = ~(torch.isfinite(measured[1]) & (measured[1] <= most))
            self.placed.routers.balance(self.pieces, self._routed, self.recipe.router_bias, refused)
        self.placed.after_update()
        loss, norm = measured.tolist()
        finite = math.isfinite(norm)
        self.scale.update(overflow=not finite)
        experts = self.placed.routers.load(self._routed.tolist())
        return StepResult(loss, norm, lr, finite and norm <= most, () if finite else self._blame(), experts)

    def _blame(self) -> tuple[int, ...]:
        """Which rank's gradients are not finite. After the sum that is lost; strict mode keeps each rank's own."""
        sums = [gradient(piece) for piece in self.pieces if piece.tensor.grad is not None]
        before = self.placed.exact is not None and not math.isfinite(float(self.placed.exact.largest))
        after = not all(bool(torch.isfinite(one).all()) for one in sums)
        own = [int(self.mesh.rank == rank) for rank in range(self.mesh.world)]
        found = self.mesh.hosts.sum_integers([*(before * one for one in own), *(after * one for one in own)])
        for part in (found[: self.mesh.world], found[self.mesh.world :]):
            blamed = tuple(rank for rank, guilty in enumerate(part) if guilty)
            if 0 < len(blamed) < max(2, self.mesh.world):
                return blamed
        return ()

    def _measure(self, losses: list[Tensor]) -> Tensor:
        """The sum of all losses and the norm of all gradients, everything counted once."""
        mesh, mine = self.mesh, own_losses(losses, self.mesh)
        self._routed = self.placed.routers.seen()
        if self.placed.exact is not None:
            if self._routed.numel():
                self._routed = torch.tensor(mesh.hosts.sum_floats(self._routed.tolist()), dtype=torch.float64)
            exact = [strict_loss(mine, mesh), strict_norm(self.pieces, mesh)]
            return torch.tensor(exact, dtype=torch.float64, device=mesh.device)
        squares = squared_norm([piece for piece in self.pieces if piece.counted], mesh.device)
        # Of equal gradients one counts, but each has to be finite: a machine may have spoiled any of them.
        others = squared_norm([piece for piece in self.pieces if not piece.counted], mesh.device)
        squares = torch.where(torch.isfinite(others), squares, math.nan)
        both = torch.cat([torch.stack([added(mine, mesh.device), squares]), self._routed])
        if mesh.world > 1:
            # One small message for all. Between hosts, so that here they wait for their devices.
            both = torch.tensor(mesh.hosts.sum_floats(both.tolist()), dtype=torch.float64, device=mesh.device)
        self._routed = both[2:]
        return torch.stack([both[0], both[1].sqrt()])

    def _micro_batch(self, step: int, batch: Batch) -> MicroBatch:
        noise = self._noise(step, batch)
        return MicroBatch(batch.tokens, batch.positions, batch.documents, batch.targets, noise)

    def _noise(self, step: int, batch: Batch) -> Tensor | None:
        """One key a sequence for its dropout masks: a hash of (seed, step, its place in the global batch)."""
        if self.recipe.dropout == 0:
            return None
        keys = [key(self.recipe.seed, step, f"row {row}") for row in batch.rows.tolist()]
        return torch.tensor(keys, dtype=torch.int64, device=self.mesh.device)


def own_losses(losses: list[Tensor], mesh: Mesh) -> list[Tensor]:
    """Ranks that split tensors compute the same loss: the first of them speaks for all."""
    return losses if mesh.coords["tp"] == 0 else []


def added(losses: list[Tensor], device: torch.device) -> Tensor:
    """In double precision; 0 where the network does not end on this rank."""
    if not losses:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(losses).double().sum()


def summed_loss(losses: list[Tensor], placed: Placed, mesh: Mesh) -> float:
    """All ranks' losses, in strict mode without any rounding."""
    mine = own_losses(losses, mesh)
    return (
        strict_loss(mine, mesh)
        if placed.exact is not None
        else mesh.hosts.sum_floats([float(added(mine, mesh.device))])[0]
    )
