"""Communication between the hosts of all ranks: small sums over gloo, and texts through the store.

A rank that works alone, as the first does in a checkpoint commit, may take an hour. In a collective its peers would
time out, so they wait for a key of the store instead. If that rank dies meanwhile, the launcher sees it and ends them
all.
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

# Timeout for work that one rank does alone: far longer than any commit, but finite.
PATIENCE = timedelta(hours=6)


class HostGroup:
    """All ranks, each represented by its host. Every rank has to make the same calls in the same order."""

    def __init__(
        self,
        rank: int,
        world: int,
        group: dist.ProcessGroup | ControlTree | None,
        store: SignedStore | None,
    ) -> None:
        """``group`` has all ranks, None if there is only one. Without a ``store`` texts travel in collectives too."""
        self.rank, self.world, self.group = rank, world, group
        self.store = store  # the launcher reads it as well
        if store is not None and world > 1:
            store.shared_by(world)
        self._between = store if world > 1 else None
        self._keys: dict[str, int] = {}

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """Each value summed over all ranks, on the host of every rank."""
        return [int(value) for value in self._all_reduce(torch.tensor(values, dtype=torch.int64))]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Like ``sum_integers``, in double precision."""
        return [float(value) for value in self._all_reduce(torch.tensor(values, dtype=torch.float64))]

    def largest(self, value: float) -> float:
        """The largest of all ranks' values; NaN if any of them is not finite."""
        # A separate flag: whether a maximum keeps a NaN depends on which operand the NaN is.
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
        """Every rank's values, equally many from each, concatenated on every host."""
        if isinstance(self.group, ControlTree):
            return self.group.all_gather(mine)
        every = mine.flatten().repeat(self.world)
        if self.group is not None:
            all_gather_single(every, mine.flatten(), group=self.group)
        return every

    def all_gather(self, text: str) -> list[str]:
        """Every rank's text, on every rank. Sent as bytes in a collective: torch's object collectives would unpickle
        them.
        """
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
        """Every rank's text, on the first rank; an empty list elsewhere. Ranks may arrive as late as they like."""
        if self._between is None:
            every = self.all_gather(text)
            return every if self.rank == 0 else []
        key = self.new_key("gathered")
        return gather_texts(self._between, self.rank, self.world, key, text, PATIENCE)

    def broadcast(self, text: str) -> str:
        """The first rank's text, on every rank. It may arrive as late as it likes."""
        if self._between is None:
            return self.all_gather(text)[0]
        key = self.new_key("told")
        if self.rank == 0:
            self._between.set(key, text)
            return text
        return self._between.wait(key, PATIENCE)

    def wait_for_first_rank(self) -> None:
        """Wait until the first rank has finished its work alone; the first rank itself does not wait."""
        key = self.new_key("first-rank-done")
        if self.rank == 0:
            self.announce(key)
        else:
            self.wait(key)

    def announce(self, key: str) -> None:
        """Release the ranks that ``wait`` for a key. Without a store there is no such wait: the next collective
        blocks.
        """
        if self._between is not None:
            self._between.set(key, "")

    def wait(self, key: str) -> None:
        if self._between is not None:
            self._between.wait(key, PATIENCE)

    def new_key(self, kind: str) -> str:
        """A new key of the store: the same on every rank, because all ask for the same kinds in the same order."""
        self._keys[kind] = self._keys.get(kind, 0) + 1
        return f"{kind}-{self._keys[kind]}"
