"""Device memory beyond tensors: workspaces, allocator fragmentation, CUDA context, communicators."""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.cluster import Cluster
from shoal.predict.memory.allocator_rounding import allocator_remainders
from shoal.predict.memory.inventory import RankInventory
from shoal.predict.workload import Workload

# cuBLAS and cuBLASLt take 32 MiB each from torch's allocator on Hopper: 0.067 GiB seen before the first step.
WORKSPACE = 64 * 2**20
# Reserved over allocated memory: the measured median and 90th percentile. Predictions are compared with measurements
# at the median; whether a plan fits is decided at the 90th percentile.
FRAGMENTED = 1.038
FRAGMENTED_P90 = 1.071
# A CUDA context with torch's kernels loaded, and the NCCL communicator of one group: 0.5 to 0.7 GB were seen.
CONTEXT = 500 * 2**20
COMMUNICATOR = 600 * 10**6
# A device's share of host memory if not given: 2 TiB for eight devices, as in the vendors' reference systems; an
# eighth is reserved for the system and the data.
HOST_MEMORY = 256 * 2**30
# Desktop cards: one per machine, whose board takes 128 GiB.
DESKTOP, DESKTOP_MEMORY = "RTX", 128 * 2**30
HOST_USABLE = 7 / 8
# The same for disks: a DGX H100 has eight of 3.84 TB for eight devices. An eighth is reserved for checkpoints and
# data.
NVME = 3.84e12
NVME_USABLE = 7 / 8


class Band(NamedTuple):
    reserved: int
    total: int
    p90: int  # the total at the 90th percentile of fragmentation


def beside_tensors(rank: RankInventory) -> int:
    """What libraries take from torch's allocator, and what it adds to tensors by rounding up."""
    return 0 if rank.workload.cluster.device.name == "cpu" else WORKSPACE + round(allocator_remainders(rank))


def on_top(workload: Workload, allocated: int) -> Band:
    """Memory beyond the allocated bytes. None on a CPU: its allocator returns memory, and gloo holds almost none."""
    if workload.cluster.device.name == "cpu":
        return Band(allocated, allocated, allocated)
    reserved = round(allocated * FRAGMENTED)
    beside = CONTEXT + communicators(workload) * COMMUNICATOR
    return Band(reserved, reserved + beside, round(allocated * FRAGMENTED_P90) + beside)


def host_share(cluster: Cluster) -> int:
    """Host memory that one device may use."""
    return round(host_memory(cluster) * HOST_USABLE)


def host_memory(cluster: Cluster) -> int:
    """One device's part of its machine's memory, assumed if not given."""
    if cluster.host_memory is not None:
        return cluster.host_memory // cluster.devices_per_node
    return DESKTOP_MEMORY if cluster.device.name.startswith(DESKTOP) else HOST_MEMORY


def nvme_share(cluster: Cluster) -> int:
    """Disk space that one device may use."""
    mine = NVME if cluster.nvme is None else cluster.nvme / cluster.devices_per_node
    return round(mine * NVME_USABLE)


def communicators(workload: Workload) -> int:
    """Communicators: one per axis with several ranks, one for sharded states; a pipeline has one per direction."""
    layout = workload.layout
    axes = [layout.dp, layout.shards, layout.tp, layout.cp, layout.pp, layout.pp, layout.ep]
    return sum(1 for ranks in axes if ranks > 1)
