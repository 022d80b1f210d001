"""Mesh: the one object that knows ranks and process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.facts.layout import Layout
from shoal.facts.layout.parameter_groups import RankGroup, placement
from shoal.facts.layout.ranks import AXES, coordinates, stride
from shoal.facts.strategies import purpose_of
from shoal.parallel.control_tree import ControlTree, control_group
from shoal.parallel.hosts import HostGroup
from shoal.parallel.signed_store import SignedStore


class Mesh:
    """This rank's coordinates in the layout and its process groups. A group of one rank is None.

    ``control`` carries small decisions between hosts over gloo, so that agreeing on them never waits for a GPU. Beyond
    a few dozen ranks it is a tree of groups instead of one, which would connect every host to every other.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: torch.device,
        store: SignedStore | None = None,
        timeout: timedelta | None = None,
        transport: str | None = None,
        nodes: int = 1,
        domain: int | None = None,
    ) -> None:
        """``transport`` carries tensors, "nccl" or "gloo", if the ranks' group does not say.

        ``nodes``: the number of machines, with equal numbers of ranks in rank order. ``domain``: how many consecutive
        ranks fast links join; None: all.
        """
        self.layout = layout
        self.rank = rank
        self.world = layout.world
        self.nodes = nodes
        self.domain = domain
        self.timeout = timeout
        self.device = device
        self.coords = coordinates(rank, layout)
        self.data_index = self.coords["dp"] * layout.fsdp + self.coords["fsdp"]
        # The rank that speaks for all ranks working on the same rows.
        self.first_of_replica = all(self.coords[axis] == 0 for axis in ("pp", "cp", "tp"))
        self.transport = transport
        self.everyone: dist.ProcessGroup | None = None  # all ranks, on their devices
        self.control: dist.ProcessGroup | None = None
        hosts: dist.ProcessGroup | ControlTree | None = None
        self._axes: DeviceMesh | None = None
        self._expert_axes: DeviceMesh | None = None
        self._others: dict[RankGroup, dist.ProcessGroup | None] = {}
        self._made: dict[str, str] = {}
        if self.world > 1:
            backend = dist.get_backend()
            self.transport = transport or backend
            self.everyone = self.control = hosts = dist.group.WORLD
            if self.transport != "gloo":
                # In a dry run, whose ranks only pretend to communicate, this group is fake like all the others.
                if backend == "fake":
                    self.control = hosts = dist.new_group(timeout=timeout)
                else:
                    hosts = control_group(rank, self.world, timeout)
                    self.control = None if isinstance(hosts, ControlTree) else hosts
            names = [axis for axis in AXES if getattr(layout, axis) > 1]
            sizes = [getattr(layout, axis) for axis in names]
            self._axes = init_device_mesh(device.type, tuple(sizes), mesh_dim_names=tuple(names))
        # Build this now: a dry run's ranks are still numbers here, and later become tensors without data.
        self.sharding = self._sharding(experts=False)
        self.expert_sharding = self._sharding(experts=True) if layout.ep > 1 else None
        self.hosts = HostGroup(rank, self.world, hosts, store)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one on that axis only."""
        if self._axes is None or getattr(self.layout, axis) == 1:
            return None
        return self._axes.get_group(axis)

    def index_in(self, ranks: RankGroup) -> int:
        """This rank's index among evenly spaced ones."""
        return self.rank // ranks.stride % ranks.size

    def group_of(self, ranks: RankGroup) -> dist.ProcessGroup | None:
        """This rank's group of that kind. All ranks have to ask, in the same order."""
        if ranks.size == 1:
            return None
        axis = ranks.name
        if axis in AXES and ranks == RankGroup(axis, getattr(self.layout, axis), stride(axis, self.layout)):
            return self.group(axis)
        if ranks not in self._others:
            starts = [rank for rank in range(self.world) if rank // ranks.stride % ranks.size == 0]
            every = [[start + index * ranks.stride for index in range(ranks.size)] for start in starts]
            self._others[ranks] = self._subgroup(axis, every)
        return self._others[ranks]

    def _sharding(self, experts: bool) -> DeviceMesh | None:
        """The ranks that hold the same parameters, in FSDP's form: replicas, if there are several, then shards.

        None where parameters are not sharded.
        """
        layout = self.layout
        placed = placement(layout.tp, layout.cp, layout.fsdp, layout.dp, layout.ep if experts else 1)
        if placed.sharded.size == 1 or layout.zero < 3:
            return None
        several = [one for one in (placed.replicated, placed.sharded) if one.size > 1]
        groups = [group for one in several if (group := self.group_of(one)) is not None]
        ranks = torch.tensor(self.rank - sum(self.index_in(one) * one.stride for one in several))
        for one in several:
            ranks = ranks[..., None] + torch.arange(one.size) * one.stride
        one_or_both = groups if len(groups) > 1 else groups[0]
        names = tuple(one.name for one in several)
        return DeviceMesh.from_group(one_or_both, self.device.type, ranks, mesh_dim_names=names)

    def subgroup(self, axis: str, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Split every line of ranks along an axis into the same parts, each a group; returns this rank's, if it is in
        one.
        """
        return self._subgroup(axis, self._parts(axis, parts))

    def _subgroup(self, axis: str, every: list[list[int]]) -> dist.ProcessGroup | None:
        mine: dist.ProcessGroup | None
        mine, _ = dist.new_subgroups_by_enumeration(every, timeout=self.timeout)
        if mine is not None:
            self._made[mine.group_name] = axis
        return mine

    def line_of(self, axis: str) -> dist.ProcessGroup:
        """One more group of the ranks along an axis, connected by NCCL at once.

        NCCL would otherwise connect at the first call and wait for all of the ranks: a message has only two.
        """
        device = self.device if self.transport == "nccl" and self.device.type == "cuda" else None
        line = range(getattr(self.layout, axis))
        lines = [
            dist.new_group(ranks, timeout=self.timeout, device_id=device)
            for ranks in self._parts(axis, [line])
        ]
        (mine,) = [group for group in lines if isinstance(group, dist.ProcessGroup)]
        self._made[mine.group_name] = axis
        return mine

    def _parts(self, axis: str, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        apart = stride(axis, self.layout)
        starts = [rank for rank in range(self.world) if coordinates(rank, self.layout)[axis] == 0]
        return [[start + index * apart for index in part] for start in starts for part in parts]

    @property
    def names(self) -> dict[str, str]:
        """Names of process groups, torch's and ours, for each axis and for axes that act as one."""
        if self._axes is None:
            return {}
        named = [("world", self.everyone), ("world", self.control)]
        if isinstance(self.hosts.group, ControlTree):
            named += [("control", group) for _, group in self.hosts.group.levels]
        named += [(axis, self.group(axis)) for axis in AXES]
        named += [(ranks.name, group) for ranks, group in self._others.items()]
        return {group.group_name: name for name, group in named if group is not None}

    @property
    def purposes(self) -> dict[str, str]:
        """What each process group is used for, by torch's name of the group; includes groups that strategies made."""
        return {name: purpose_of(axis) for name, axis in {**self.names, **self._made}.items()}

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()
