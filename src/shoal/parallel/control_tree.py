"""A tree of small gloo groups over all ranks' hosts, because in one world-sized group every host would hold a socket to
every other.

Sixteen neighbours form a group; the first ranks of sixteen groups form a group again, and so on up to rank 0. A sum
goes up and comes back down: 16,384 ranks have four levels, and no rank needs more than 48 sockets for it.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.renamed import all_gather_single

FAN = 16
# Up to this many ranks share one group: a sum is one call, and a rank has no more sockets than in the tree.
FLAT = 64


def members(rank: int, world: int, fan: int = FAN) -> list[list[int]]:
    """The ranks of each group that ``rank`` is in, lowest level first; it is not the first rank of its last group."""
    found, stride = [], 1
    while stride < world and rank % stride == 0:
        first = rank - rank % (stride * fan)
        ranks = [other for other in range(first, first + stride * fan, stride) if other < world]
        if len(ranks) > 1:
            found.append(ranks)
        stride *= fan
    return found


def sockets(rank: int, world: int) -> int:
    """How many sockets a rank holds for this: one for every other member of its groups."""
    groups = members(rank, world) if world > FLAT else [list(range(world))]
    return sum(len(ranks) - 1 for ranks in groups)


def levels(world: int, fan: int = FAN) -> list[list[list[int]]]:
    """All groups of each level, the lowest first."""
    found, stride = [], 1
    while stride < world:
        firsts = range(0, world, stride * fan)
        groups = [list(range(first, min(first + stride * fan, world), stride)) for first in firsts]
        found.append([ranks for ranks in groups if len(ranks) > 1])
        stride *= fan
    return found


class ControlTree:
    """One rank's groups. Every rank has to make the same calls in the same order."""

    def __init__(self, rank: int, world: int, timeout: timedelta | None, fan: int = FAN) -> None:
        self.rank, self.world, self.fan = rank, world, fan
        self.levels: list[tuple[list[int], dist.ProcessGroup]] = []
        # All ranks go through all groups and connect only their own. torch can let the members alone create a group,
        # but then names it by how many groups each member has made before (2.11 to 2.13), and a group's first rank has
        # made more.
        for groups in levels(world, fan):
            for ranks in groups:
                group = dist.new_group(ranks, timeout=timeout, backend="gloo", group_desc="control")
                if rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    self.levels.append((ranks, group))

    def all_reduce(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> None:
        """All-reduce in place. Each level sums its groups in rank order, so the same world gives the same sum."""
        for _, group in self.levels:
            dist.all_reduce(values, how, group=group)
        self._spread(values)

    def all_gather(self, mine: Tensor) -> Tensor:
        """Every rank's values, concatenated in rank order."""
        held = mine.flatten()
        for ranks, group in self.levels:
            # Groups at the end of the world may be smaller; the unused room lies behind its last rank.
            room = torch.zeros(mine.numel() * (ranks[1] - ranks[0]), dtype=mine.dtype)
            room[: held.numel()] = held
            held = torch.empty(room.numel() * len(ranks), dtype=mine.dtype)
            all_gather_single(held, room, group=group)
        every = torch.zeros(self.world * mine.numel(), dtype=mine.dtype)
        every[: held.numel()] = held[: every.numel()]
        self._spread(every)
        return every

    def _spread(self, values: Tensor) -> None:
        """Broadcast from the first rank down: at each level, a group's first rank already has the values from above."""
        for ranks, group in reversed(self.levels):
            dist.broadcast(values, ranks[0], group=group)


def control_group(
    rank: int, world: int, timeout: timedelta | None = None
) -> dist.ProcessGroup | ControlTree | None:
    """A group of all ranks' hosts, or a tree of groups."""
    if world > FLAT:
        return ControlTree(rank, world, timeout)
    group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
    return group
