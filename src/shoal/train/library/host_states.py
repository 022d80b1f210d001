"""``offload=optimizer`` of a module of one's own: the script's optimizer updates copies in the host's memory.

An optimizer keeps its states beside what it updates, so these are the host's too, and so is the update. The device has
weights and gradients: a step copies gradients to the host, and new weights back. Nothing is done ahead of time, as the
engine does for networks that it built (``parallel/offload/states.py``): what an update of the script's own optimizer
reads is known when it has ended.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.facts.layout.offload import offloaded
from shoal.parallel.offload.host_memory import HostMemory
from shoal.parallel.shards import Shard


class HostStates:
    """Of some pieces the copies that the optimizer updates, and where their gradients wait for it."""

    def __init__(self, pieces: list[Shard], fraction: float, device: torch.device) -> None:
        """The last ``fraction`` of all elements, in whole pieces; they have the values that are on the device."""
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
        """The device has other values than an update made: the first ones, or a checkpoint's."""
        for piece, copy in self.copies.items():
            copy.copy_(piece.tensor)

    @torch.no_grad()
    def leave(self) -> None:
        """Gradients of this step go to the host, and take no room on the device any longer."""
        for piece, copy in self.copies.items():
            found = piece.tensor.grad
            copy.grad = None if found is None else self.gradients[piece].copy_(found, non_blocking=True)
        self._wait()
        for piece in self.copies:
            piece.tensor.grad = None

    @torch.no_grad()
    def come_back(self) -> None:
        """New weights go to the device."""
        for piece, copy in self.copies.items():
            if copy.grad is not None:
                piece.tensor.copy_(copy, non_blocking=True)
        self._wait()  # until then the copies must not change

    def _wait(self) -> None:
        if any(piece.tensor.is_cuda for piece in self.copies):
            torch.cuda.current_stream().synchronize()
