"""Reduce gradients in buckets during the backward pass, in the same order on every rank.

Each bucket is sent as soon as it and all earlier ones are complete, overlapped with the computation of earlier layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torch import nn

from shoal.parallel.shards import HeldParameter


class Filled(Protocol):
    """Parameters whose gradients are sent together."""

    held: list[HeldParameter]
    missing: int  # gradients still to arrive


AnyBucket = TypeVar("AnyBucket", bound=Filled)


class BucketReducer(Generic[AnyBucket]):
    """The buckets of a stage, filled from the last to the first layer as the backward pass goes."""

    def __init__(
        self,
        cut: list[AnyBucket],
        take: Callable[[AnyBucket, int], None] | None,
        send: Callable[[AnyBucket], None],
    ) -> None:
        """``take`` is called with every gradient, ``send`` with every bucket whose gradients are complete."""
        self.buckets, self.take, self.send = cut, take, send
        self.listening = False
        self._next = 0
        for bucket in cut:
            for number, one in enumerate(bucket.held):
                one.parameter.register_post_accumulate_grad_hook(self._arrived(bucket, number))

    def reset(self, listening: bool) -> None:
        """Start a backward pass; unless ``listening``, its gradients only accumulate."""
        self.listening = listening
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.held)

    def send_rest(self) -> None:
        """Send all remaining buckets: no more gradients come.

        That is all of them if weight gradients are computed apart from the backward pass, which no hook sees.
        """
        for bucket in self.buckets[self._next :]:
            self.send(bucket)
        self._next = len(self.buckets)
        self.listening = False

    def _arrived(self, bucket: AnyBucket, number: int) -> Callable[[nn.Parameter], None]:
        def hook(parameter: nn.Parameter) -> None:
            if not self.listening:
                return
            if self.take is not None:
                self.take(bucket, number)
            bucket.missing -= 1
            while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
                self.send(self.buckets[self._next])
                self._next += 1

        return hook
