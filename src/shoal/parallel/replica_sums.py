"""HSDP gradients reduced in a different precision than they are stored in: free each sum as soon as it is stored.

FSDP2 (torch 2.11 to 2.13) keeps the buffer of every unit's all-reduce until the end of the backward pass, so that the
allocator does not reuse it while the sum is in flight. Where the sum itself becomes the gradient, that costs nothing.
Where it is cast, or copied on its way to the host, a second set of gradients piles up, unit by unit. Two buffers are
enough: the one being summed, and the one before it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor


class ReplicaSum(NamedTuple):
    """One unit's sum over the replicas, and the event after which all earlier sums have been cast."""

    buffer: Tensor
    earlier_are_cast: torch.cuda.Event | None


class ReplicaSums:
    """A hook after every all-reduce (``FSDPModule.set_all_reduce_hook``).

    A buffer belongs to the reduce-scatter stream: once freed, its memory may hold the next unit's buffer. That stream
    first waits for the compute stream, so it is enough that the compute stream waits until the buffer has been cast.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computation: torch.cuda.Stream | None = None
        self._sums: deque[ReplicaSum] = deque()

    def begin(self) -> None:
        """Call before a backward pass, on the stream that computes it: the hook cannot see that stream."""
        self._sums.clear()
        self._computation = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def __call__(self, buffer: Tensor) -> None:
        """Called on the all-reduce stream, before this sum is cast and after the previous one was."""
        if len(self._sums) == 2:
            landed, following = self._sums.popleft(), self._sums[0]
            if self._computation is not None and following.earlier_are_cast is not None:
                self._computation.wait_event(following.earlier_are_cast)
            # FSDP still holds the tensor; free its storage, as FSDP does with gathered parameters.
            landed.buffer.untyped_storage().resize_(0)
        event = None if self._computation is None else torch.cuda.current_stream(self._device).record_event()
        self._sums.append(ReplicaSum(buffer, event))

    def end(self) -> None:
        """Call after a backward pass, when FSDP has waited for all sums and released them itself."""
        self._sums.clear()
