"""The ranks between which links are measured (``profile --calibrate``, ``bench comm``): started here, or adopted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.measure import TIMES, WARM_UP, measure
from shoal.comm.operations import TimedCollective
from shoal.comm.ring import RingStep, ShownRing, show_ring
from shoal.facts.calibration import LinkRates, file
from shoal.facts.cluster.this_machine import usable_threads
from shoal.launch.adopt.launched_rank import LaunchedRank
from shoal.launch.init_rank import given_threads, name_interface
from shoal.launch.interfaces import LOOPBACK_INTERFACE, interface_towards
from shoal.launch.local import PRELOAD, warm_workers
from shoal.launch.ranks import run_ranks
from shoal.parallel.control_tree import control_group
from shoal.parallel.hosts import HostGroup
from shoal.parallel.signed_store import SignedStore
from shoal.predict.time.link_fit import PRICED, link_rates
from shoal.train.files import replace_text

SMALL, LARGE = 2**12, {"nccl": 2**28, "gloo": 2**23}
PATIENCE = 90.0
# Bytes/s that any link worth waiting for reaches.
SLOWEST = 20e6


@dataclass(frozen=True)
class StartedRanks:
    """Ranks on this machine, each with its own device unless they share."""

    world: int
    backend: str
    share: bool = False

    nodes = 1
    prints = True

    def measure(self, operations: Sequence[str], sizes: Sequence[int]) -> list[TimedCollective]:
        found: list[TimedCollective] = self._everywhere(
            _measure, patience(operations, sizes), operations, sizes
        )[0]
        return found

    def show_ring(self) -> list[ShownRing]:
        return self._everywhere(_show_ring, PATIENCE)

    def _everywhere(self, part: Callable[..., Any], seconds: float, *arguments: Any) -> list[Any]:
        warm_workers((*PRELOAD, __name__))
        return run_ranks(self.world, _in_group, (self, seconds, part, arguments), seconds)


@dataclass(frozen=True)
class AdoptedRanks:
    """Ranks started by a launcher, of which this process is one; on one node or several."""

    told: LaunchedRank
    backend: str
    share = False

    @property
    def world(self) -> int:
        return self.told.world

    @property
    def nodes(self) -> int:
        return self.told.nodes

    @property
    def prints(self) -> bool:
        return self.told.rank == 0

    def measure(self, operations: Sequence[str], sizes: Sequence[int]) -> list[TimedCollective]:
        with self._group(patience(operations, sizes)) as device:
            return measure(operations, sizes, device)

    def show_ring(self) -> list[ShownRing]:
        with self._group(PATIENCE) as device:
            rank, world = self.told.rank, self.world
            hosts = HostGroup(rank, world, control_group(rank, world), None)
            return [_read_ring(text) for text in hosts.all_gather(json.dumps(show_ring(device)))]

    @contextmanager
    def _group(self, seconds: float) -> Iterator[torch.device]:
        device = _device(self.backend, self.told.local_rank, self.told.local_world)
        # By default gloo uses the interface that the host's name resolves to, which may not lead to the others.
        interface = interface_towards(self.told.host) if self.nodes > 1 else LOOPBACK_INTERFACE
        if interface is not None:
            name_interface(interface)
        dist.init_process_group(self.backend, timeout=timedelta(seconds=seconds))
        try:
            yield device
        finally:
            dist.destroy_process_group()


def patience(operations: Sequence[str], sizes: Sequence[int]) -> float:
    """The time limit of a whole measurement."""
    return PATIENCE + sum(sizes) * len(operations) * (WARM_UP + TIMES) / SLOWEST


def links(devices: int, on_cpu: bool) -> LinkRates | None:
    """None if there is no peer."""
    ranks = StartedRanks(2 if on_cpu else devices, "gloo" if on_cpu else "nccl")
    if ranks.world < 2:
        return None
    largest = LARGE[ranks.backend]
    return link_rates(ranks.measure(PRICED, (SMALL, largest // 16, largest)), described(ranks))


def keep(folder: Path, device: str, kind: str, rates: LinkRates) -> Path:
    """Store rates where predictions read them; ``kind`` is "fast" within a node, "network" between nodes."""
    path = file.links_file(folder, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, file.with_link(folder, device, kind, rates).model_dump_json(indent=1) + "\n")
    return path


def described(ranks: StartedRanks | AdoptedRanks) -> str:
    """Where rates come from, in a few words."""
    where = "this machine" if ranks.nodes == 1 else f"{ranks.nodes} nodes"
    return f"{ranks.backend}, {ranks.world} ranks of {where}"


def _read_ring(text: str) -> ShownRing:
    steps, *rest = json.loads(text)
    return ShownRing([RingStep(*step) for step in steps], *rest)


def _measure(device: torch.device, operations: Sequence[str], sizes: Sequence[int]) -> list[TimedCollective]:
    return measure(operations, sizes, device)


def _show_ring(device: torch.device) -> ShownRing:
    return show_ring(device)


def _in_group(
    rank: int,
    world: int,
    store: SignedStore,
    ranks: StartedRanks,
    seconds: float,
    part: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """One rank's part."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    if ranks.share:
        # NCCL rejects two ranks on one device of the same host. Different host ids avoid the check.
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    device = _device(ranks.backend, rank, world)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(ranks.backend, store=store.plain, rank=rank, world_size=world, timeout=timeout)
    return part(device, *arguments)


def _device(backend: str, local_rank: int, here: int) -> torch.device:
    if backend == "nccl":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(given_threads() or max(1, usable_threads() // here))
    return torch.device("cpu")
