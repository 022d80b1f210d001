"""HSDP gradients summed in another precision than they are stored in: free each as soon as it is stored.

FSDP2 (torch 2.11 to 2.13) keeps the buffer of every unit's all-reduce to the end of the backward pass, so that the
allocator does not hand it out while the sum is still under way. Where the sum itself stays as the gradient that costs
nothing. Where it is cast, a second set of gradients piles up beside them, unit by unit. Two units are enough: one that
is being summed, and the one before it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor


class ReplicaSum(NamedTuple):
    """One unit's sum over the replicas, and the moment by which it is done and all earlier ones have been cast."""

    buffer: Tensor
    earlier_are_cast: torch.cuda.Event | None


class ReplicaSums:
    """A hook after every all-reduce (``FSDPModule.set_all_reduce_hook``).

    A buffer belongs to the stream that scatters sums: once it is let go, the next unit's may lie there. That stream
    first waits for the one that computes, so it is enough if this one waits until the buffer has been cast.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computation: torch.cuda.Stream | None = None
        self._sums: deque[ReplicaSum] = deque()

    def begin(self) -> None:
        """Before a backward pass, in the stream that it will compute in: from the hook that is not to be seen."""
        self._sums.clear()
        self._computation = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def __call__(self, buffer: Tensor) -> None:
        """Called in the stream of the all-reduce, before the cast of this sum and after that of the one before."""
        if len(self._sums) == 2:
            landed, following = self._sums.popleft(), self._sums[0]
            if self._computation is not None and following.earlier_are_cast is not None:
                self._computation.wait_event(following.earlier_are_cast)
            # FSDP holds the tensor on; as it does with gathered parameters, its storage goes.
            landed.buffer.untyped_storage().resize_(0)
        event = None if self._computation is None else torch.cuda.current_stream(self._device).record_event()
        self._sums.append(ReplicaSum(buffer, event))

    def end(self) -> None:
        """After a backward pass, when FSDP has waited for all sums and let go of them itself."""
        self._sums.clear()
