"""One training step: forward, backward, reduce, clip, update; the same in every layout.

The whole step is issued to the device before any of its numbers is read, so the host can prepare the next step
meanwhile.
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

# Index in a step's numbers where the loss's extra measures begin; router numbers follow them.
REPORTED = 4


@dataclass(frozen=True)
class StepResult:
    """The results of a step, the same on every rank."""

    loss: float  # mean over all targets of the global batch: tokens, or pairs
    grad_norm: float
    lr: float
    updated: bool  # False: a gradient was not finite, so the weights were left unchanged
    blamed: tuple[int, ...] = ()  # the ranks where it began, if known
    experts: ExpertLoad | None = None  # None: the model has none
    measures: Mapping[str, float] = field(
        default_factory=dict
    )  # what the loss reports in addition to its value


class IssuedStep:
    """A step issued to the device. Its results are known when the device has finished it."""

    def __init__(
        self,
        step: Step,
        measured: Tensor,
        lr: float,
        most: float,
        begun: torch.Event | None,
        updating: Future[None] | None,
    ) -> None:
        """``updating``: the part of the update that still runs on the host."""
        self._step, self._lr, self._most, self._begun, self._updating = step, lr, most, begun, updating
        # Into pinned memory: reading it waits only for this step, not for what was issued after it.
        self._numbers = measured.to("cpu", non_blocking=True)
        self._before, step.last_end = step.last_end, _event(step.mesh.device)
        self._end = step.last_end

    def read(self) -> StepResult:
        """Wait for the step's end on device and host. Call it once, on every rank."""
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
        """Seconds that the device was idle before this step, which must have been read; None if unknown."""
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
        self.draws = recipe.dropout > 0 or (
            adapters is not None and adapters.dropout > 0
        )  # draws dropout masks
        self.routed = REPORTED + len(self.measures)  # index in a step's numbers where router numbers begin
        self.host: HostUpdate | None = None  # updates offloaded pieces
        if placed.offloaded is not None:
            self.host = HostUpdate(placed, placed.offloaded, optimizer, recipe, mesh)
        self.early: UpdatesInBackward | None = None  # set if the backward pass updates
        self.average = WeightAverage(optimizer, self.pieces, recipe.ema) if recipe.ema else None
        self.last_end: torch.Event | None = None  # end of the previous step, on devices with events
        self.corrected = any(piece.name.endswith(CORRECTION) for piece in self.pieces)
        # Called before the weights change: the last moment for background readers to finish.
        self.before_update: Callable[[], None] = lambda: None
        # Gradients with a larger norm do not reach the weights. Must return the same on all ranks.
        self.refuse_above: Callable[[], float] = lambda: math.inf

    def __call__(self, step: int, batches: list[Batch], targets: int) -> StepResult:
        """Run this rank's micro-batches of one step.

        ``targets`` counts the target tokens of the global batch. Every micro-batch's summed loss is divided by it
        before the backward pass, so gradients only ever need to be summed: over micro-batches and over ranks, however
        unevenly tokens are spread.
        """
        return self.issue(step, batches, targets).read()

    def issue(self, step: int, batches: list[Batch], targets: int) -> IssuedStep:
        """Like a call, but without waiting for the device."""
        begun = _event(self.mesh.device)
        return self.issue_update(step, self.compute_gradients(step, batches, targets), begun)

    def agree(self, targets: int, stop: bool = False) -> tuple[int, bool]:
        """One small all-reduce that tells every rank how many targets the step has, and whether any rank was asked
        to stop.
        """
        total, asking = self.mesh.hosts.sum_integers([targets, int(stop)])
        return total, asking > 0

    def compute_gradients(self, step: int, batches: list[Batch], targets: int) -> Tensor:
        """Leave the global batch's gradients with the pieces.

        Returns, on the device: the mean loss; the gradient norm; whether this rank's own gradients and its shard of the
        sums are non-finite; the loss's extra measures; and the routers' counts (``RouterTally``).
        """
        placed = self.placed
        targets = max(1, targets)  # a batch may have no targets
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
        """Clip the gradients and update the weights, unless a gradient is not finite."""
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
        """Wait until the host has updated the offloaded pieces; then all pieces have their values."""
        if self.host is not None:
            self.host.wait()

    @property
    def host_bytes(self) -> int:
        """Host memory that Shoal has allocated: buffers and offloaded states."""
        pieces = [] if self.host is None else self.host.offloaded.pieces
        away = [piece.tensor for piece in pieces if piece.filed is None]
        states = [state for tensor in away for state in self.optimizer.state.get(tensor, {}).values()]
        kept = [*away, *(one for one in states if isinstance(one, Tensor) and one.ndim)]
        return self.placed.host.bytes + sum(one.nbytes for one in kept)

    @property
    def nvme_bytes(self) -> int:
        """Bytes on local disks used by offloaded tensors."""
        return 0 if self.placed.files is None else self.placed.files.content

    def _measure(self, losses: list[Tensor], targets: int) -> Tensor:
        """Losses and gradients of all ranks, everything counted once."""
        mesh, exact, mine = self.mesh, self.placed.exact, own_losses(losses, self.mesh)
        squares = squared_norm([piece for piece in self.pieces if piece.counted], mesh.device)
        # Of equal copies only one counts, but each has to be finite: a machine may have corrupted any of them.
        others = squared_norm([piece for piece in self.pieces if not piece.counted], mesh.device)
        squares = torch.where(torch.isfinite(others), squares, math.nan)
        # After the reduction all ranks have the non-finite value; strict mode knows what each rank had before it.
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
        """One dropout key per sequence: a hash of (seed, step, its place in the global batch)."""
        if not self.draws:
            return None
        keys = [key(self.recipe.seed, step, f"row {row}") for row in batch.rows.tolist()]
        return to_device(torch.tensor(keys, dtype=torch.int64), self.mesh.device)


def _blamed(spoiled: Sequence[float], mesh: Mesh) -> tuple[int, ...]:
    """The ranks where a non-finite gradient began, if that can be told."""
    every = mesh.hosts.sum_integers(
        [int(mesh.rank == rank and bool(one)) for one in spoiled for rank in range(mesh.world)]
    )
    for part in (every[: mesh.world], every[mesh.world :]):
        blamed = tuple(rank for rank, guilty in enumerate(part) if guilty)
        if 0 < len(blamed) < max(2, mesh.world):
            return blamed
    return ()


def _event(device: torch.device) -> torch.Event | None:
    """An event after everything issued so far; None for a CPU, which is synchronous."""
    if device.type == "cpu":
        return None
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def own_losses(losses: list[Tensor], mesh: Mesh) -> list[Tensor]:
    """Ranks that split tensors compute the same loss: only the first of them counts it."""
    return losses if mesh.coords["tp"] == 0 else []


def added(losses: list[Tensor], measures: Sequence[str], device: torch.device) -> Tensor:
    """A loss's sums and its extra measures, in fp64; 0 if the network does not end on this rank."""
    if not losses:
        return torch.zeros(1 + len(measures), dtype=torch.float64, device=device)
    return torch.stack(losses).double().sum(0)


def strict_sums(losses: list[Tensor], measures: Sequence[str], mesh: Mesh) -> list[float]:
    return [strict_loss([one[number] for one in losses], mesh) for number in range(1 + len(measures))]


def summed_loss(losses: list[Tensor], placed: Placed, mesh: Mesh) -> list[float]:
    """All ranks' losses, then their extra measures; without any rounding in strict mode."""
    mine = own_losses(losses, mesh)
    if placed.exact is not None:
        return strict_sums(mine, placed.measures, mesh)
    return mesh.hosts.sum_floats(added(mine, placed.measures, mesh.device).tolist())


def micro_batch(batch: Batch, noise: Tensor | None = None) -> MicroBatch:
    return MicroBatch(batch.tokens, batch.positions, batch.documents, batch.targets, noise, batch.reference)
