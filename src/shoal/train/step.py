"""One training step: forward, backward, reduce, clip, update; the same in every layout.

All of it is given to the device before any of its numbers is read: meanwhile the host can prepare the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.facts.model.parameters import CORRECTION
from shoal.facts.recipe import Recipe
from shoal.models.device_copy import to_device
from shoal.models.random import key
from shoal.parallel.mesh import Mesh
from shoal.parallel.placed import Placed
from shoal.parallel.router_tally import ExpertLoad
from shoal.parallel.stage_module import MicroBatch
from shoal.parallel.strict import strict_loss, strict_norm
from shoal.train.average import WeightAverage
from shoal.train.data.loader import Batch
from shoal.train.host_update import HostUpdate
from shoal.train.in_backward import UpdatesInBackward
from shoal.train.optimizer import (
    LossScale,
    clip_and_update,
    learning_rate,
    refuses,
    set_learning_rate,
    squared_norm,
    unscale,
    writes_copies,
)

# Where, among a step's numbers, those that its loss reports begin; those of routers follow.
REPORTED = 4


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank."""

    loss: float  # mean over what the whole global batch has to predict: its target tokens, or its pairs
    grad_norm: float
    lr: float
    updated: bool  # False: a gradient was not finite and the weights were left alone
    blamed: tuple[int, ...] = ()  # the ranks that it came from, where that can be told
    experts: ExpertLoad | None = None  # None: the model has none
    measures: Mapping[str, float] = field(default_factory=dict)  # what the loss reports beside itself


class IssuedStep:
    """A step that the device has been given. What it did is known when the device has come to its end."""

    def __init__(
        self,
        step: Step,
        measured: Tensor,
        lr: float,
        most: float,
        begun: torch.Event | None,
        updating: Future[None] | None,
    ) -> None:
        """``updating``: what the host still does of it."""
        self._step, self._lr, self._most, self._begun, self._updating = step, lr, most, begun, updating
        # Into pinned memory: reading it waits for this step alone, not for what was issued after it.
        self._numbers = measured.to("cpu", non_blocking=True)
        self._before, step.last_end = step.last_end, _event(step.mesh.device)
        self._end = step.last_end

    def read(self) -> StepResult:
        """Wait for the step's end, on the device and on the host. To be called once, on every rank alike."""
        if self._updating is not None:
            self._updating.result()
        if self._end is not None:
            self._end.synchronize()
        numbers = self._numbers.tolist()
        step = self._step
        (loss, norm, *spoiled), measured = numbers[:REPORTED], numbers[REPORTED : step.routed]
        finite = math.isfinite(norm)
        step.scale.update(overflow=not finite)
        blamed = () if finite else _blamed(spoiled, step.mesh)
        experts = step.placed.routers.load(numbers[step.routed :])
        measures = dict(zip(step.measures, measured, strict=True))
        return StepResult(loss, norm, self._lr, finite and norm <= self._most, blamed, experts, measures)

    @property
    def idle_before(self) -> float | None:
        """Seconds for which the device had nothing to do before this step, which was read; None where unknown."""
        if self._begun is None or self._before is None:
            return None
        return float(self._before.elapsed_time(self._begun)) / 1e3


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
        self.measures = placed.measures
        adapters = placed.segments[0].network.shape.adapters
        self.draws = recipe.dropout > 0 or (adapters is not None and adapters.dropout > 0)  # masks, in a step
        self.routed = REPORTED + len(self.measures)  # where, among a step's numbers, those of routers begin
        self.host: HostUpdate | None = None  # of what is offloaded
        if placed.offloaded is not None:
            self.host = HostUpdate(placed, placed.offloaded, optimizer, recipe, mesh)
        self.early: UpdatesInBackward | None = None  # where the backward pass updates
        self.average = WeightAverage(optimizer, self.pieces, recipe.ema) if recipe.ema else None
        self.last_end: torch.Event | None = None  # of the step before, on a device that keeps events
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
        return self.issue(step, batches, targets).read()

    def issue(self, step: int, batches: list[Batch], targets: int) -> IssuedStep:
        """As a call, without waiting for the device."""
        begun = _event(self.mesh.device)
        return self.issue_update(step, self.compute_gradients(step, batches, targets), begun)

    def agree(self, targets: int, stop: bool = False) -> tuple[int, bool]:
        """One small sum tells every rank how many targets the step has, and whether any rank was asked to stop."""
        total, asking = self.mesh.hosts.sum_integers([targets, int(stop)])
        return total, asking > 0

    def compute_gradients(self, step: int, batches: list[Batch], targets: int) -> Tensor:
        """Leave the global batch's gradients with the pieces.

        Returns, on the device: its mean loss; their norm; of this rank, whether its own gradients and the sums that
        it holds were spoiled (not finite); what the loss reports; and what all routers did (``RouterTally``).
        """
        placed = self.placed
        targets = max(1, targets)  # a batch may have nothing to predict
        if self.early is not None:
            self.before_update()
            self.early.begin(step)
        micro_batches = [self._micro_batch(step, batch) for batch in batches]
        placed.start_step(len(micro_batches))
        losses = placed.executor.forward_backward(micro_batches, self.scale.value / targets, self.scale.value)
        placed.finish_step(self.recipe.batch)
        unscale(self.pieces, self.scale.value)
        return self._measure(losses, targets)

    def update(self, step: int, measured: Tensor) -> StepResult:
        """Clip the gradients and move the weights, unless a gradient is not finite."""
        return self.issue_update(step, measured).read()

    def issue_update(self, step: int, measured: Tensor, begun: torch.Event | None = None) -> IssuedStep:
        lr, most = learning_rate(self.recipe, step), self.refuse_above()
        copied = writes_copies(self.optimizer)
        if self.early is None:
            self.settle()
            self.before_update()
            set_learning_rate(self.optimizer, lr)
            clip_and_update(self.optimizer, self.pieces, measured[1], self.recipe.clip, most, step)
        else:
            self.early.finish()
            copied = self.early.writes_copies
        updating = None
        if self.host is not None:
            updating = self.host.start(measured[1], self.recipe.clip, most)
        if self.corrected:
            refused = refuses(measured[1], most)
            self.placed.routers.balance(
                self.pieces, measured[self.routed :], self.recipe.router_bias, refused
            )
        if self.average is not None:
            self.average.follow(refuses(measured[1], most))
        self.placed.after_update(copied=copied, returned=True)
        return IssuedStep(self, measured, lr, most, begun, updating)

    def settle(self) -> None:
        """Until the host has updated what is offloaded: then the pieces have their values."""
        if self.host is not None:
            self.host.wait()

    @property
    def host_bytes(self) -> int:
        """Of the host's memory, what Shoal has taken: buffers, and states that are offloaded."""
        pieces = [] if self.host is None else self.host.offloaded.pieces
        away = [piece.tensor for piece in pieces if piece.filed is None]
        states = [state for tensor in away for state in self.optimizer.state.get(tensor, {}).values()]
        kept = [*away, *(one for one in states if isinstance(one, Tensor) and one.ndim)]
        return self.placed.host.bytes + sum(one.nbytes for one in kept)

    @property
    def nvme_bytes(self) -> int:
        """Of local disks, what tensors take that wait there."""
        return 0 if self.placed.files is None else self.placed.files.content

    def _measure(self, losses: list[Tensor], targets: int) -> Tensor:
        """Losses and gradients of all ranks, everything counted once."""
        mesh, exact, mine = self.mesh, self.placed.exact, own_losses(losses, self.mesh)
        squares = squared_norm([piece for piece in self.pieces if piece.counted], mesh.device)
        # Of equal gradients one counts, but each has to be finite: a machine may have spoiled any of them.
        others = squared_norm([piece for piece in self.pieces if not piece.counted], mesh.device)
        squares = torch.where(torch.isfinite(others), squares, math.nan)
        # After the sum over ranks all of them are spoiled; strict mode knows what each rank had before.
        own = squares if exact is None else exact.largest
        spoiled = torch.stack([~torch.isfinite(own), ~torch.isfinite(squares)])
        routed = self.placed.routers.seen()
        if exact is not None:
            if routed.numel():
                routed = torch.tensor(mesh.hosts.sum_floats(routed.tolist()), dtype=torch.float64)
            sums = [*strict_sums(mine, self.measures, mesh), strict_norm(self.pieces, mesh)]
            *lost, norm = torch.tensor(sums, dtype=torch.float64, device=mesh.device)
        else:
            summed = torch.cat([added(mine, self.measures, mesh.device), squares[None], routed])
            if mesh.everyone is not None:
                dist.all_reduce(summed, group=mesh.everyone)
            *lost, squares = summed[: len(self.measures) + 2]
            norm, routed = squares.sqrt(), summed[len(self.measures) + 2 :]
        loss, *measures = (one / targets for one in lost)
        return torch.cat([torch.stack([loss, norm, *spoiled, *measures]), routed.to(mesh.device)])

    def _micro_batch(self, step: int, batch: Batch) -> MicroBatch:
        noise = self._noise(step, batch)
        return micro_batch(batch, noise)

    def _noise(self, step: int, batch: Batch) -> Tensor | None:
        """One key a sequence for its dropout masks: a hash of (seed, step, its place in the global batch)."""
        if not self.draws:
            return None
        keys = [key(self.recipe.seed, step, f"row {row}") for row in batch.rows.tolist()]
        return to_device(torch.tensor(keys, dtype=torch.int64), self.mesh.device)


def _blamed(spoiled: Sequence[float], mesh: Mesh) -> tuple[int, ...]:
    """The ranks that a gradient which is not finite came from, if that can be told."""
    every = mesh.hosts.sum_integers(
        [int(mesh.rank == rank and bool(one)) for one in spoiled for rank in range(mesh.world)]
    )
    for part in (every[: mesh.world], every[mesh.world :]):
        blamed = tuple(rank for rank, guilty in enumerate(part) if guilty)
        if 0 < len(blamed) < max(2, mesh.world):
            return blamed
    return ()


def _event(device: torch.device) -> torch.Event | None:
    """The end of all that the device was given so far; None for a CPU, which has done it."""
    if device.type == "cpu":
        return None
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def own_losses(losses: list[Tensor], mesh: Mesh) -> list[Tensor]:
    """Ranks that split tensors compute the same loss: the first of them speaks for all."""
    return losses if mesh.coords["tp"] == 0 else []


def added(losses: list[Tensor], measures: Sequence[str], device: torch.device) -> Tensor:
    """A loss's sums, with what it measures, in double precision; 0 where the network does not end on this rank."""
    if not losses:
        return torch.zeros(1 + len(measures), dtype=torch.float64, device=device)
    return torch.stack(losses).double().sum(0)


def strict_sums(losses: list[Tensor], measures: Sequence[str], mesh: Mesh) -> list[float]:
    return [strict_loss([one[number] for one in losses], mesh) for number in range(1 + len(measures))]


def summed_loss(losses: list[Tensor], placed: Placed, mesh: Mesh) -> list[float]:
    """All ranks' losses, then what they measure; in strict mode without any rounding."""
    mine = own_losses(losses, mesh)
    if placed.exact is not None:
        return strict_sums(mine, placed.measures, mesh)
    return mesh.hosts.sum_floats(added(mine, placed.measures, mesh.device).tolist())


def micro_batch(batch: Batch, noise: Tensor | None = None) -> MicroBatch:
    return MicroBatch(batch.tokens, batch.positions, batch.documents, batch.targets, noise, batch.reference)
