"""Run a pipeline schedule over stages of a network that Shoal built."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.models.cross_entropy import PendingWeightGradient
from shoal.models.loss import Head
from shoal.parallel.context import SequenceShare
from shoal.parallel.deferred import Deferred
from shoal.parallel.mesh import Mesh
from shoal.parallel.router_tally import RouterTally
from shoal.parallel.schedule_executor import ScheduleExecutor, StepState
from shoal.parallel.shards import Reducer
from shoal.parallel.stage_module import MicroBatch, StageModule

__all__ = ["Executor", "StepState"]


class Executor(ScheduleExecutor):
    """Runs this rank's segments."""

    def __init__(
        self,
        segments: list[StageModule],
        mesh: Mesh,
        gradients: Reducer,
        deferred: Deferred | None = None,
        strict: bool = False,
        compiled: bool = False,
        routers: RouterTally | None = None,
    ) -> None:
        """See ``ScheduleExecutor``."""
        super().__init__(segments, mesh, gradients, deferred, compiled)
        self._network = segments[0].network
        self._compute = self._network.model.compute
        self.sequence = SequenceShare(self.layout, mesh.coords["cp"])
        self.heads: list[Head] = [segment.network.lm_head for segment in segments if segment.stage.last]
        self.routers = routers
        self.strict = strict
        if self.deferred is not None:
            for segment in segments:
                self.deferred.watch(segment)

    def kind(self, batch: MicroBatch) -> torch.Size:
        return batch.tokens.shape

    def entry(self, batch: MicroBatch) -> Tensor:
        return batch.tokens

    def boundary(self, stage: int, batch: MicroBatch) -> tuple[tuple[int, ...], torch.dtype]:
        return self._hidden_shape(batch), self._compute

    def forward_backward(self, batches: list[MicroBatch], factor: float, scale: float = 1.0) -> list[Tensor]:
        """Compute gradients of the losses times ``factor``; return the loss's sums of each micro-batch whose last stage
        is here.

        Batches have whole rows; where ranks share rows, each rank's loss is a partial sum. ``scale``: the part of the
        factor that also multiplies the routers' losses.
        """
        batches = [self.sequence.of(batch) for batch in batches]
        self.load_kernels(batches[0])
        for head in self.heads:
            # Strict mode needs each micro-batch's gradient separately. Otherwise the head's deferred gradients
            # accumulate.
            head.start_step(factor, None if self.strict else PendingWeightGradient())
        if self.routers is not None:
            self.routers.start_step(scale)
        return self.both_passes(batches)

    @torch.no_grad()
    def forward_only(self, batches: list[MicroBatch], place: int | None = None) -> list[Tensor]:
        """The loss's sums of each micro-batch (or the logits after ``place``) where the network's last stage is here.

        ``place`` counts local tokens.
        """
        batches = [self.sequence.of(batch) for batch in batches]
        self.load_kernels(batches[0], place)
        return self.forward_passes(batches, place)

    def scores(self, batch: MicroBatch, place: int) -> Tensor:
        """Logits [rows, vocabulary] for the token after ``place`` of whole rows, on every rank of the replica."""
        # Ranks without that token score another one: every rank must join every collective.
        holder, own = self.sequence.holder(place, batch.tokens.shape[1])
        here = self.forward_only([batch], own)
        size = (batch.tokens.shape[0], self._network.shape.vocab)
        scores = here[0] if here else torch.empty(size, device=self.mesh.device)
        for axis, source in (("pp", self._rank_of(self.stages - 1)), ("cp", holder)):
            if (group := self.mesh.group(axis)) is not None:
                scores = scores.to(torch.float64).contiguous()
                dist.broadcast(scores, group=group, group_src=source)
        return scores

    def _hidden_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Shape of what passes between stages; with sequence parallelism each rank sends only its own tokens."""
        rows, length = batch.tokens.shape
        if self.layout.sp:
            length //= self.layout.tp
        return rows, length, self._network.shape.hidden
