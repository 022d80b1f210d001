"""Communication between the hosts of all ranks: small sums over gloo, and texts by way of the store.

A rank that works alone, as the first does in a commit, may take an hour. In a collective its peers would give up on it,
so they wait for a key of the store. Should it die meanwhile, the launcher sees that and ends them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.renamed import all_gather_single
from shoal.parallel.control_tree import ControlTree
from shoal.parallel.gathered_texts import gather_texts
from shoal.parallel.signed_store import SignedStore

# For what a rank does alone: far beyond any commit, and still an end.
PATIENCE = timedelta(hours=6)


class HostGroup:
    """All ranks, each by its host. Every rank has to make the same calls in the same order."""

    def __init__(
        self,
        rank: int,
        world: int,
        group: dist.ProcessGroup | ControlTree | None,
        store: SignedStore | None,
    ) -> None:
        """``group`` has all ranks, None if there is one. Without a ``store`` texts travel in collectives too."""
        self.rank, self.world, self.group = rank, world, group
        self.store = store  # which the launcher reads as well
        if store is not None and world > 1:
            store.shared_by(world)
        self._between = store if world > 1 else None
        self._keys: dict[str, int] = {}

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Each value summed over all ranks, known to the host of every one of them."""
        return [int(value) for value in self._all_reduce(torch.tensor(values, dtype=torch.int64))]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """As ``sum_integers``, in double precision."""
        return [float(value) for value in self._all_reduce(torch.tensor(values, dtype=torch.float64))]

    def largest(self, value: float) -> float:
        """The largest of all ranks' values; not a number if one of them is not finite."""
        # A flag of its own: whether a maximum keeps a NaN depends on which side of it the NaN stands.
        finite = math.isfinite(value)
        most = torch.tensor([value if finite else 0.0, float(not finite)], dtype=torch.float64)
        self._all_reduce(most, dist.ReduceOp.MAX)
        return math.nan if float(most[1]) else float(most[0])

    def _all_reduce(self, values: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if isinstance(self.group, ControlTree):
            self.group.all_reduce(values, how)
        elif self.group is not None:
            dist.all_reduce(values, how, group=self.group)
        return values

    def all_gather_values(self, mine: Tensor) -> Tensor:
        """Every rank's values, as many of each, one after another on the host of every rank."""
        if isinstance(self.group, ControlTree):
            return self.group.all_gather(mine)
        every = mine.flatten().repeat(self.world)
        if self.group is not None:
            all_gather_single(every, mine.flatten(), group=self.group)
        return every

    def all_gather(self, text: str) -> list[str]:
        """Every rank's text, on every rank. A collective, as bytes: torch's own for objects would unpickle them."""
        if self.group is None:
            return [text]
        content = text.encode()
        sizes = self.sum_integers([len(content) * (self.rank == rank) for rank in range(self.world)])
        mine = torch.zeros(max([*sizes, 1]), dtype=torch.uint8)
        mine[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
        if isinstance(self.group, ControlTree):
            every = list(self.group.all_gather(mine).view(self.world, -1))
        else:
            every = [torch.empty_like(mine) for _ in sizes]
            dist.all_gather(every, mine, group=self.group)
        return [bytes(one[:size].tolist()).decode() for one, size in zip(every, sizes, strict=True)]

    def gather(self, text: str) -> list[str]:
        """Every rank's text, on the first rank; elsewhere nothing. Ranks may come as late as they like."""
        if self._between is None:
            every = self.all_gather(text)
            return every if self.rank == 0 else []
        key = self.new_key("gathered")
        return gather_texts(self._between, self.rank, self.world, key, text, PATIENCE)

    def broadcast(self, text: str) -> str:
        """The first rank's text, on every rank. It may come as late as it likes."""
        if self._between is None:
            return self.all_gather(text)[0]
        key = self.new_key("told")
        if self.rank == 0:
            self._between.set(key, text)
            return text
        return self._between.wait(key, PATIENCE)

    def wait_for_first_rank(self) -> None:
        """Wait until the first rank is done with what it does alone; it goes on at once."""
        key = self.new_key("first-rank-done")
        if self.rank == 0:
            self.announce(key)
        else:
            self.wait(key)

    def announce(self, key: str) -> None:
        """End the ``wait`` of others for a key. Without a store there is none: the next collective is what waits."""
        if self._between is not None:
            self._between.set(key, "")

    def wait(self, key: str) -> None:
        if self._between is not None:
            self._between.wait(key, PATIENCE)

    def new_key(self, kind: str) -> str:
        """A key of the store: the same on every rank, for all ask for the same kinds in the same order."""
        self._keys[kind] = self._keys.get(kind, 0) + 1
        return f"{kind}-{self._keys[kind]}"
