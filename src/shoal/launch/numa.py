"""Bind a rank to the cores beside its device, so that memory it touches first is on that side of the machine.

Unbound threads migrate, and a copy to a GPU that crosses sockets shares their link with all others. Restrictions by a
scheduler or ``numactl`` are respected: only cores that the process may already use are considered.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

SYSTEM = Path("/sys")


def bind_to_numa(device: torch.device, local_rank: int, here: int, system: Path = SYSTEM) -> list[int]:
    """Bind to the cores of a GPU's NUMA node or, for one of ``here`` ranks on CPUs, to a share of the nodes.

    Returns the cores; empty if there is nothing to choose.
    """
    if not hasattr(os, "sched_setaffinity"):
        return []
    mine = os.sched_getaffinity(0)
    found = _beside_gpu(device, system) if device.type == "cuda" else _share(mine, local_rank, here, system)
    chosen = found & mine
    if not chosen or chosen == mine:
        return []
    try:
        os.sched_setaffinity(0, chosen)
    except OSError:  # not permitted in this container: the run continues unbound
        return []
    return sorted(chosen)


def _beside_gpu(device: torch.device, system: Path) -> set[int]:
    told = torch.cuda.get_device_properties(device)
    place = [getattr(told, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return set()
    domain, bus, slot = place
    return _cores(
        system / "bus" / "pci" / "devices" / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "local_cpulist"
    )


def _share(mine: set[int], local_rank: int, here: int, system: Path) -> set[int]:
    """Ranks of a machine are assigned in order, so that neighbours, which communicate most, share a node."""
    folders = (system / "devices" / "system" / "node").glob("node[0-9]*")
    nodes = [_cores(folder / "cpulist") for folder in sorted(folders, key=lambda one: int(one.name[4:]))]
    nodes = [cores for cores in nodes if cores & mine]
    if len(nodes) < 2 or here < len(nodes):  # a rank that has several nodes uses all of them
        return set()
    return nodes[local_rank % here * len(nodes) // here]


def _cores(path: Path) -> set[int]:
    """Parse ``0-3,8``; empty if the system does not say."""
    found: set[int] = set()
    try:
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return found
