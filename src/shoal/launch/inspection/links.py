"""Measure the bandwidth of a node's links, among its own devices and with its partners; one rank's part."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.measure import measure
from shoal.launch.init_rank import INTERFACES
from shoal.launch.ranks import run_ranks
from shoal.parallel.signed_store import SignedStore

# Bytes of the timed all-reduce: large enough for a link's bandwidth, and done within seconds on a slow one.
SIZE = {"nccl": 2**28, "gloo": 2**22}
TIMES = 5
PATIENCE = 60.0  # seconds for a group of ranks to connect, and for each of its sums


@dataclass(frozen=True)
class LinkPlan:
    """What the leader asks all to measure, as JSON."""

    host: str
    port: int
    nodes: list[int]
    devices: int  # of each node
    backend: str
    rounds: list[list[list[int]]]
    interface: str


@dataclass
class LinkFigures:
    """One rank's measurements: bus bandwidth in bytes/s, or why there are none."""

    inside: float | None = None  # among the devices of its node
    pairs: dict[str, float] = field(default_factory=dict)  # by partner
    together: float | None = None  # all ranks
    trouble: dict[str, str] = field(default_factory=dict)  # by partner; "" for the node, "all" for all ranks


def measured(plan: LinkPlan, node: int) -> list[dict[str, Any]]:
    """Measurements of this node's devices, one process each."""
    if plan.devices == 1:
        store = dist.TCPStore(plan.host, plan.port, is_master=False, timeout=timedelta(seconds=PATIENCE))
        return [measure_links(store, plan, node, 0)]
    from shoal.launch.local import PRELOAD, warm_workers

    warm_workers((*PRELOAD, __name__))
    groups = 2 + len(plan.rounds)
    found: list[dict[str, Any]] = run_ranks(plan.devices, _in_process, (plan, node), groups * 2 * PATIENCE)
    return found


def _in_process(rank: int, world: int, local: SignedStore, plan: LinkPlan, node: int) -> dict[str, Any]:
    store = dist.TCPStore(plan.host, plan.port, is_master=False, timeout=timedelta(seconds=PATIENCE))
    return measure_links(store, plan, node, rank)


def measure_links(store: dist.Store, plan: LinkPlan, node: int, device: int) -> dict[str, Any]:
    """Measure one device: with its neighbours, with the same device of other nodes, and with all."""
    for variable in INTERFACES:
        os.environ.setdefault(variable, plan.interface)
    torch_device = torch.device("cpu")
    if plan.backend == "nccl":
        torch_device = torch.device("cuda", device % torch.cuda.device_count())
        torch.cuda.set_device(torch_device)
    found, devices = LinkFigures(), plan.devices

    def rate(name: str, rank: int, world: int) -> float:
        own = dist.PrefixStore(f"shoal-doctor-{name}", store)
        return _bandwidth(own, rank, world, plan.backend, torch_device)

    def note(key: str, work: Callable[[], float]) -> float | None:
        try:
            return work()
        except (RuntimeError, OSError) as error:
            found.trouble[key] = str(error).strip().splitlines()[0][:200]
            return None

    if devices > 1:
        found.inside = note("", lambda: rate(f"node-{node}", device, devices))
    for number, pairs in enumerate(plan.rounds):
        for first, second in pairs:
            if node in (first, second):
                name, other = f"pair-{number}-{first}-{device}", str(first + second - node)
                got = note(other, lambda: rate(name, int(node == second), 2))  # noqa: B023 called at once
                if got is not None:
                    found.pairs[other] = got
    if len(plan.nodes) > 1 and _all_well(store, len(plan.nodes) * devices, bool(found.trouble)):
        place = plan.nodes.index(node) * devices + device
        found.together = note("all", lambda: rate("all", place, len(plan.nodes) * devices))
    return asdict(found)


def _all_well(store: dist.Store, world: int, trouble: bool) -> bool:
    """Whether all ranks finished their pairs without trouble: otherwise a group of all ranks would hang."""
    store.add("shoal-doctor-bad", int(trouble))
    if store.add("shoal-doctor-through", 1) == world:
        store.set("shoal-doctor-go", "stay" if store.add("shoal-doctor-bad", 0) else "go")
    try:
        store.wait(["shoal-doctor-go"], timedelta(seconds=2 * PATIENCE))
        return bool(store.get("shoal-doctor-go") == b"go")
    except RuntimeError:  # a lost rank never finishes
        return False


def _bandwidth(store: dist.Store, rank: int, world: int, backend: str, device: torch.device) -> float:
    """Bus bandwidth of an all-reduce in a separate group: the fastest of several, since other load slows some."""
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    try:
        return measure(("all_reduce",), (SIZE[backend],), device, TIMES, min)[0].bus_bandwidth
    finally:
        dist.destroy_process_group()
