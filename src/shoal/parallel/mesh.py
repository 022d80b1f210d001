"""Mesh: the one object that knows ranks and process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.facts.layout import Layout

# From the slowest to the fastest: neighbours on the last axis have neighbouring ranks, hence the best links.
AXES = ("pp", "dp", "fsdp", "cp", "tp")

# For what a rank does alone: far beyond any commit, and still an end.
PATIENCE = timedelta(hours=6)


def coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Where a rank stands on each axis."""
    place: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, getattr(layout, axis))
    return place


class Mesh:
    """This rank's place in the layout and the groups it talks in. A group of one is None: nobody to talk to.

    ``control`` carries small decisions between hosts over gloo, so that agreeing on them never waits for a GPU.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: torch.device,
        store: dist.Store | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.world = layout.world
        self.store = store
        self._waits = 0
        self.device = device
        self.place = coordinates(rank, layout)
        self.data_index = self.place["dp"] * layout.fsdp + self.place["fsdp"]
        self.replicas: dist.ProcessGroup | None = None
        self.control: dist.ProcessGroup | None = None
        if self.world > 1:
            self.replicas = dist.group.WORLD
            if dist.get_backend() == "gloo":
                self.control = dist.group.WORLD
            else:
                self.control = dist.new_group(backend="gloo", timeout=timeout)

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Each value summed over all ranks, known to the host of every one of them."""
        total = torch.tensor(values, dtype=torch.int64)
        if self.control is not None:
            dist.all_reduce(total, group=self.control)
        return [int(value) for value in total]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """As ``sum_integers``, in double precision."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.control is not None:
            dist.all_reduce(total, group=self.control)
        return [float(value) for value in total]

    def wait_for_first_rank(self) -> None:
        """Wait until the first rank is done with what it does alone, be it a commit that takes an hour.

        In a collective its peers would give up on it, so they wait for a key of the store. Should it die meanwhile,
        the launcher sees that and ends them all.
        """
        if self.store is None or self.world == 1:
            return
        self._waits += 1
        key = f"first-rank-done-{self._waits}"
        if self.rank == 0:
            self.store.set(key, "")
        else:
            self.store.wait([key], PATIENCE)

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()
