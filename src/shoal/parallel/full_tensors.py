"""Gather whole tensors on the first rank from the shards of all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.facts.model.tensor_split import Box
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import Shard


@dataclass(frozen=True)
class RemoteShard:
    """Another rank's piece of a parameter."""

    box: Box
    start: int
    stop: int
    dtype: torch.dtype

    def as_json(self) -> list[Any]:
        box = self.box
        return [box.whole, box.offset, box.shape, self.start, self.stop, str(self.dtype)]

    @classmethod
    def from_json(cls, fields: list[Any]) -> RemoteShard:
        whole, offset, shape, start, stop, dtype = fields
        box = Box(tuple(whole), tuple(offset), tuple(shape))
        return cls(box, start, stop, getattr(torch, dtype.removeprefix("torch.")))


class Collector:
    """Knows which rank holds which elements of every parameter."""

    def __init__(self, pieces: list[Shard], mesh: Mesh) -> None:
        self.mesh = mesh
        self.mine = {piece.name: piece for piece in pieces if piece.counted and piece.stop > piece.start}
        table = {
            name: RemoteShard(piece.box, piece.start, piece.stop, piece.tensor.dtype)
            for name, piece in self.mine.items()
        }
        self.tables: list[dict[str, RemoteShard]] = [table] * mesh.world
        # Through host memory: the first rank writes from there, and its device has no room for everything. In large
        # worlds not all hosts are connected, so there tensors go from device to device.
        self.group, self.device = mesh.control, torch.device("cpu")
        if mesh.control is None:
            self.group, self.device = mesh.everyone, mesh.device
        if mesh.world > 1:
            # Only the first rank assembles tensors, so only it needs to know who holds what.
            told = mesh.hosts.gather(json.dumps({name: entry.as_json() for name, entry in table.items()}))
            self.tables = [
                {name: RemoteShard.from_json(fields) for name, fields in json.loads(text).items()}
                for text in told
            ]
        self.name = mesh.hosts.new_key("collector")
        self._asked = 0

    def whole(self, name: str, value: Callable[[Shard], Tensor]) -> Tensor | None:
        """A parameter's whole tensor, assembled from ``value`` of each of its pieces; None except on the first rank.

        Every rank has to ask for the same names in the same order.
        """
        self._asked += 1
        if self.mesh.rank != 0:
            if name in self.mine:
                # A send would time out and take the first rank for dead while it is busy writing.
                self.mesh.hosts.wait(f"{self.name}-{self._asked}")
                dist.send(
                    value(self.mine[name]).detach().to(self.device).reshape(-1), group=self.group, group_dst=0
                )
            return None
        holders = [(rank, table[name]) for rank, table in enumerate(self.tables) if name in table]
        if any(rank != 0 for rank, _ in holders):
            self.mesh.hosts.announce(f"{self.name}-{self._asked}")
        return self._assemble(name, holders, value)

    def _assemble(
        self, name: str, holders: list[tuple[int, RemoteShard]], value: Callable[[Shard], Tensor]
    ) -> Tensor:
        first = holders[0][1]
        whole = torch.empty(first.box.whole, dtype=first.dtype)
        boxes: dict[Box, Tensor] = {}
        for rank, entry in holders:
            if entry.box not in boxes:
                boxes[entry.box] = torch.empty(math.prod(entry.box.shape), dtype=entry.dtype)
            part = boxes[entry.box][entry.start : entry.stop]
            if rank == 0:
                part.copy_(value(self.mine[name]).detach().reshape(-1))
            else:
                there = part.to(self.device)
                dist.recv(there, group=self.group, group_src=rank)
                part.copy_(there)
        for box, values in boxes.items():
            whole[box.slices] = values.view(box.shape)
        return whole
