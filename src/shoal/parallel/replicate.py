"""Data parallelism (``dp``): every rank holds the whole model; gradients are all-reduced.

Gradients live in flat buckets. During the backward pass of the last micro-batch, each bucket is all-reduced as soon as
its last gradient arrives, overlapped with the computation of earlier layers. Earlier micro-batches only accumulate.

Why not torch's DistributedDataParallel: it re-cuts its buckets after the first iteration of a process, and with three
or more ranks an element's place in its bucket decides the order of summation. A resumed run would then differ from an
uninterrupted one in the last bits. Here ``facts.groups`` fixes the buckets.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.facts.layout.buckets import buckets
from shoal.parallel.bucket_reducer import BucketReducer
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import HeldParameter, WholeParameters, gradient_bytes


class GradientBucket:
    """Parameters whose gradients are views of one flat tensor."""

    def __init__(self, held: list[HeldParameter]) -> None:
        self.held = held
        parameters = [one.parameter for one in held]
        self.flat = torch.zeros(
            sum(parameter.numel() for parameter in parameters),
            dtype=parameters[0].grad_dtype,
            device=parameters[0].device,
        )
        self.missing = 0
        sizes = [parameter.numel() for parameter in parameters]
        self.views = [view.view_as(one) for view, one in zip(self.flat.split(sizes), parameters, strict=True)]
        self.clear()

    def clear(self) -> None:
        self.flat.zero_()
        for one, view in zip(self.held, self.views, strict=True):
            # An optimizer's ``zero_grad`` may have replaced the view.
            if one.parameter.grad is not view:
                one.parameter.grad = view


class Replicate(WholeParameters):
    """All-reduces gradients over the replicas of a model."""

    def __init__(
        self,
        held: list[HeldParameter],
        mesh: Mesh,
        bucket_bytes: int,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(held, mesh)
        self.group = mesh.group_of(held[0].group.replicated)
        self.reduce_dtype = reduce_dtype
        # Each pipeline stage finishes at its own time, so it has its own buckets.
        self.stages: dict[int, BucketReducer[GradientBucket]] = {}
        for stage in dict.fromkeys(one.stage for one in held):
            by_label = {one.label: one for one in held if one.stage == stage}
            sizes = [(label, gradient_bytes(one.parameter)) for label, one in by_label.items()]
            cut = [
                GradientBucket([by_label[label] for label in labels])
                for labels in buckets(sizes, bucket_bytes)
            ]
            self.stages[stage] = BucketReducer(cut, None, self._send)
        self._flying: list[tuple[GradientBucket, torch.Tensor, dist.Work]] = []

    def start_step(self) -> None:
        """Clear the gradients of the previous step."""
        for queue in self.stages.values():
            queue.reset(listening=False)
            for bucket in queue.buckets:
                bucket.clear()

    def before_backward(self, stage: int, last: bool) -> None:
        if (queue := self.stages.get(stage)) is not None:
            queue.reset(listening=last)

    def after_backward(self, stage: int, last: bool) -> None:
        if last and (queue := self.stages.get(stage)) is not None:
            queue.send_rest()

    def finish_step(self) -> None:
        """Wait until every bucket is summed."""
        for bucket, sent, work in self._flying:
            work.wait()
            if sent is not bucket.flat:
                bucket.flat.copy_(sent)
        self._flying.clear()
        self.move_gradients_to_masters()

    def _send(self, bucket: GradientBucket) -> None:
        sent = bucket.flat if self.reduce_dtype is None else bucket.flat.to(self.reduce_dtype)
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        assert work is not None
        self._flying.append((bucket, sent, work))
