"""Initialise a process as a rank: device, threads, process group, mesh."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.launch.interfaces import interface_of
from shoal.launch.threads import thread_count
from shoal.parallel import context
from shoal.parallel.mesh import Mesh
from shoal.parallel.signed import SignedStore
from shoal.plan.resolve import Job


def join(job: Job, rank: int, local_rank: int, store: SignedStore, nodes: int = 1) -> Mesh:
    """Join the other ranks of a job; ``store`` is where they meet. Each of the ``nodes`` has as many of them."""
    here = job.layout.world // nodes
    timeout = timedelta(seconds=job.config.fault.timeout)
    # Left to themselves they listen wherever the host's name points to.
    interface = interface_of(job.config.cluster.interface)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    if job.cluster.device.name == "cpu":
        device = torch.device("cpu")
        backend = "gloo"
        torch.set_num_threads(thread_count(job, here))
    else:
        devices = torch.cuda.device_count()
        if here > devices or job.config.cluster.share:
            # NCCL takes two ranks on one device of one host for a mistake. On two hosts it asks no questions.
            os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        if job.layout.pp > 1:
            # By default 8 hardware queues take turns with all streams. A receive that waits at the head of a queue
            # would hold up whatever else was put into it, and that may be what its sender is waiting for.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        device = torch.device("cuda", local_rank % devices)
        context.take(device)
        backend = "nccl"
    if job.layout.world > 1:
        dist.init_process_group(
            backend, store=store.plain, rank=rank, world_size=job.layout.world, timeout=timeout
        )
    return Mesh(job.layout, rank, device, store, timeout, nodes=nodes)
