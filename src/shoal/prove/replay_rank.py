"""One rank's part of a replay: repeat the steps, recording non-finite values and each sample's loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.launch.init_rank import init_rank
from shoal.models.decoder import Block
from shoal.parallel.shards import gradient
from shoal.parallel.signed_store import SignedStore
from shoal.plan.resolve import Job
from shoal.train.loop import Training
from shoal.train.run_directory import RunDirectory
from shoal.train.step import micro_batch


@dataclass(frozen=True)
class NotFinite:
    """A tensor with a non-finite value."""

    what: str  # "weight", "output" (of a block) or "gradient", in the order in which a step reaches them
    name: str
    rank: int


@dataclass(frozen=True)
class SampleLoss:
    """One sequence of the step: its place in the global batch, its index among all samples, and its loss in nats per
    token.
    """

    row: int
    sample: int
    loss: float


@dataclass
class RankFindings:
    """One rank's findings about the requested step."""

    not_finite: list[NotFinite] = field(default_factory=list)
    samples: list[SampleLoss] = field(default_factory=list)


@dataclass(frozen=True)
class ReplayRequest:
    """Which steps to repeat, and where: a scratch run that has the initial state."""

    job: Job
    run: Path
    dataset: Path
    step: int  # the step to examine
    last: int  # the last step to replay


def run_replay_rank(rank: int, world: int, store: SignedStore | None, request: ReplayRequest) -> RankFindings:
    """Run the real training until the last requested step, whose state is then committed in the scratch run."""
    mesh = init_rank(request.job, rank, rank, store)
    training = Training(request.job, RunDirectory(request.run), request.dataset, mesh)
    training.runs_ahead = False  # read each step before the next, so that findings belong to one step
    seen = RankFindings()
    watched = _Watch(training, seen, rank)

    def wants_stop() -> bool:
        if training.done == request.step - 1:
            watched.begin(request.step)
        elif training.done == request.step:
            watched.end()
        return training.done >= request.last

    training.run_to_end(wants_stop)
    watched.end()
    mesh.close()
    return seen


class _Watch:
    """Examines weights before a step, the blocks' outputs during it, and its gradients."""

    def __init__(self, training: Training, seen: RankFindings, rank: int) -> None:
        self.training, self.seen, self.rank = training, seen, rank
        self.handles: list[Any] = []
        self.watching = False
        before = training.step.before_update

        def before_update() -> None:
            before()
            if self.watching:
                for piece in training.program.pieces:
                    self._look("gradient", piece.name, gradient(piece))

        training.step.before_update = before_update

    def begin(self, step: int) -> None:
        if self.watching:
            return
        for name, part in self.training.program.placed.weights:
            self._look("weight", name, part.values)
        self.seen.samples = self._samples(step)
        for segment in self.training.program.placed.segments:
            for name, block in segment.network.model.layers.items():
                assert isinstance(block, Block)
                self.handles.append(block.register_forward_hook(self._hook(f"model.layers.{name}")))
        self.watching = True

    def end(self) -> None:
        self.watching = False
        while self.handles:
            self.handles.pop().remove()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._look("output", name, output)

        return hook

    def _look(self, what: str, name: str, values: Tensor) -> None:
        found = NotFinite(what, name, self.rank)
        if found not in self.seen.not_finite and not bool(torch.isfinite(values.detach()).all()):
            self.seen.not_finite.append(found)

    @torch.no_grad()
    def _samples(self, step: int) -> list[SampleLoss]:
        """Run every row of this rank separately, or together with the row it is compared with.

        All ranks have equally many, so their collectives match.
        """
        program = self.training.program
        together = program.loader.samples.together
        losses = []
        for places in program.positions(step):
            for place in places[::together]:
                row = program.loader.rows(step, range(place, place + together))
                batch = micro_batch(row.to(program.mesh.device))
                for found in program.placed.executor.forward_only([batch]):
                    if row.count:
                        losses.append(SampleLoss(place, row.samples[0], float(found[0]) / row.count))
        return losses
