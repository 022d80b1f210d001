"""Data parallelism with full replicas (``dp``): every rank holds the model, gradients are summed over ranks.

Gradients live in flat buckets. While the last micro-batch's backward runs, each bucket is all-reduced as soon as
its last gradient has arrived, behind the computation of earlier layers. Earlier micro-batches only accumulate.

Why not torch's DistributedDataParallel: it re-cuts its buckets after the first iteration of a process, and with
three or more ranks the place of an element in a bucket decides the order in which it is summed. A resumed run
would then differ from an uninterrupted one in the last bits. Here the cut is fixed by ``facts.groups``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from shoal.facts.groups import buckets


class Bucket:
    """Parameters whose gradients are views of one flat tensor."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = torch.zeros(
            sum(parameter.numel() for parameter in parameters),
            dtype=parameters[0].dtype,
            device=parameters[0].device,
        )
        self.missing = 0
        start = 0
        for parameter in parameters:
            parameter.grad = self.flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()


class Replicate:
    """Sums gradients over the replicas of a model."""

    def __init__(
        self,
        network: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.group = group
        self.reduce_dtype = reduce_dtype
        named = dict(network.named_parameters())
        sizes = [(name, parameter.numel() * parameter.element_size()) for name, parameter in named.items()]
        self.buckets = [Bucket([named[name] for name in names]) for names in buckets(sizes, bucket_bytes)]
        self.last_micro_batch = False
        self._next = 0
        self._flying: list[tuple[Bucket, torch.Tensor, dist.Work]] = []
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._arrived(bucket))

    def start_step(self) -> None:
        """Clear the gradients of the step before."""
        self._next = 0
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing = len(bucket.parameters)

    def finish_step(self) -> None:
        """Wait until every bucket has been summed."""
        if self._next != len(self.buckets):
            late = sum(bucket.missing for bucket in self.buckets)
            raise RuntimeError(f"{late} parameters received no gradient in the last micro-batch")
        for bucket, sent, work in self._flying:
            work.wait()
            if sent is not bucket.flat:
                bucket.flat.copy_(sent)
        self._flying.clear()

    def _arrived(self, bucket: Bucket) -> Callable[[nn.Parameter], None]:
        def hook(parameter: nn.Parameter) -> None:
            if not self.last_micro_batch:
                return
            bucket.missing -= 1
            # Ranks must issue collectives in one order, so a bucket waits for those before it.
            while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
                self._send(self.buckets[self._next])
                self._next += 1

        return hook

    def _send(self, bucket: Bucket) -> None:
        sent = bucket.flat if self.reduce_dtype is None else bucket.flat.to(self.reduce_dtype)
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        assert work is not None
        self._flying.append((bucket, sent, work))
