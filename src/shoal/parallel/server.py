"""Parameter servers: the range of parameters that a server updates, and its links to workers.

A link is a gloo group of two processes. Each worker has its own link to each server, so losing a worker takes down no
other link, and one that returns can connect again. ``dist.new_group`` could not do that: it builds groups from the
fixed ranks of one world. So links use gloo's process group directly, through the public class
``torch.distributed.ProcessGroupGloo``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.facts.layout import Layout
from shoal.facts.layout.server_ranges import ServedRange, elements, served_ranges
from shoal.models.decoder import Network
from shoal.models.initial import Fill, Slice
from shoal.parallel.mesh import Mesh
from shoal.parallel.pipeline import my_stages
from shoal.parallel.shards import HeldParameter, Shard, held_parameters, piece_slices
from shoal.parallel.stage_module import split_stages

WORKER, SERVER = 0, 1
# Numbers that precede every exchange, among them integers up to 2^53.
HEADER = 6
# Requests of a worker, and the server's commands.
PUSH, PULL, NEXT, RESULT = range(4)
TRAIN, EVALUATE, END = range(3)


class LinkLost(RuntimeError):
    """The other end of a link has died or does not answer."""


class ServerLink:
    """Send and receive between one worker and one server."""

    def __init__(self, store: dist.Store, name: str, role: int, timeout: timedelta) -> None:
        """Both ends pass the same ``name``, unique to this link; waits for the other end."""
        self.peer, self.timeout = 1 - role, timeout
        try:
            self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), role, 2, timeout)
        except RuntimeError as error:
            raise LinkLost(str(error)) from None

    def send(self, tensor: Tensor) -> None:
        self._wait(self._group.send, tensor, self.timeout)

    def receive(self, tensor: Tensor, timeout: timedelta | None = None) -> Tensor:
        self._wait(self._group.recv, tensor, timeout or self.timeout)
        return tensor

    def tell(self, *numbers: float) -> None:
        header = torch.zeros(HEADER, dtype=torch.float64)
        header[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        self.send(header)

    def hear(self, timeout: timedelta | None = None) -> list[float]:
        """``timeout``: how long to wait for the other end, if not the usual time."""
        found: list[float] = self.receive(torch.zeros(HEADER, dtype=torch.float64), timeout).tolist()
        return found

    def _wait(self, call: Callable[..., dist.Work], tensor: Tensor, timeout: timedelta) -> None:
        if not tensor.numel():
            return
        try:
            call([tensor], self.peer, 0).wait(timeout)
        except RuntimeError as error:
            raise LinkLost(str(error)) from None


class ServedParameters:
    """One server's range of a network's parameters, in one flat tensor; pieces and gradients are views of it."""

    frozen: Sequence[tuple[str, Slice]] = ()
    still: Sequence[Shard] = ()

    def __init__(self, network: Network, mesh: Mesh, seq: int, device: torch.device) -> None:
        """``network`` stays on the meta device; ``mesh`` is that of the servers."""
        held = held_on_meta(network, mesh, seq)
        mine = ranges(held, mesh.world)[mesh.rank]
        dtype = next(network.parameters()).dtype
        self.flat = torch.empty(elements(mine), dtype=dtype, device=device)
        self.gradient = torch.zeros_like(self.flat)
        by_name = {one.label: one for one in held}
        self.pieces: list[Shard] = []
        begin = 0
        for name, start, stop in mine:
            end = begin + stop - start
            tensor = nn.Parameter(self.flat[begin:end])
            tensor.grad = self.gradient[begin:end]
            self.pieces.append(Shard(by_name[name], tensor, start, stop, counted=True))
            begin = end

    @property
    def gradients(self) -> ServedParameters:
        return self

    def fill(self, give: Fill) -> None:
        give([(piece.name, part) for piece in self.pieces for part in piece_slices(piece, piece.tensor)])

    def after_update(self) -> None:
        """Nothing to do: workers pull the new values."""


def held_on_meta(network: Network, mesh: Mesh, seq: int) -> list[HeldParameter]:
    """A whole network's parameters, in forward order, without storage."""
    segments = split_stages(network, my_stages(network.shape, Layout(), 0, seq), own_head=False)
    return held_parameters(segments, network.shape, mesh)


def ranges(held: Sequence[HeldParameter], servers: int) -> list[list[ServedRange]]:
    return served_ranges([(one.label, one.parameter.numel()) for one in held], servers)
