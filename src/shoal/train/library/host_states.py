"""``offload=optimizer`` for a user's own module: the script's optimizer updates copies in host memory.

An optimizer keeps its states on the device of what it updates, so states and update are on the host too. The device has
weights and gradients: a step copies gradients to the host and new weights back. Nothing overlaps, unlike for networks
that the engine built (``parallel/offload/states.py``): only when the script's own optimizer has finished is it known
what it read.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.facts.layout.offload import offloaded
from shoal.parallel.offload.host_memory import HostMemory
from shoal.parallel.shards import Shard


class HostStates:
    """Host copies of some pieces, which the optimizer updates, and buffers for their gradients."""

    def __init__(self, pieces: list[Shard], fraction: float, device: torch.device) -> None:
        """Offload the last ``fraction`` of all elements, in whole pieces, starting from the device's values."""
        first = offloaded([piece.stop - piece.start for piece in pieces], fraction)
        memory = HostMemory(device)
        self.copies: dict[Shard, nn.Parameter] = {}
        self.gradients: dict[Shard, torch.Tensor] = {}
        for piece in pieces[first:]:
            size = piece.tensor.numel() * piece.tensor.element_size()
            values, gradient = (
                memory.take(size).bytes.view(piece.tensor.dtype).view(piece.tensor.shape) for _ in range(2)
            )
            self.copies[piece], self.gradients[piece] = nn.Parameter(values), gradient
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Copy the device's values, which no update made: the initial ones, or a checkpoint's."""
        for piece, copy in self.copies.items():
            copy.copy_(piece.tensor)

    @torch.no_grad()
    def leave(self) -> None:
        """Move this step's gradients to the host and free them on the device."""
        for piece, copy in self.copies.items():
            found = piece.tensor.grad
            copy.grad = None if found is None else self.gradients[piece].copy_(found, non_blocking=True)
        self._wait()
        for piece in self.copies:
            piece.tensor.grad = None

    @torch.no_grad()
    def come_back(self) -> None:
        """Copy new weights to the device."""
        for piece, copy in self.copies.items():
            if copy.grad is not None:
                piece.tensor.copy_(copy, non_blocking=True)
        self._wait()  # until then the copies must not change

    def _wait(self) -> None:
        if any(piece.tensor.is_cuda for piece in self.copies):
            torch.cuda.current_stream().synchronize()
