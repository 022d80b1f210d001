"""Initialise a process as a rank: device, threads, process group, mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.facts.cluster.this_machine import usable_threads
from shoal.launch.backend import register_smddp
from shoal.launch.compile_cache import use_compile_cache
from shoal.launch.interfaces import interface_of
from shoal.launch.numa import bind_to_numa
from shoal.parallel import device_context
from shoal.parallel.mesh import Mesh
from shoal.parallel.signed_store import SignedStore
from shoal.plan.resolve import Job

# Where gloo and NCCL read which interface to use.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def init_rank(
    job: Job, rank: int, local_rank: int, store: SignedStore | None, nodes: int = 1, bound: bool = False
) -> Mesh:
    """Join the other ranks of a job through ``store``; a single rank needs none. All ``nodes`` have equally many ranks.

    ``bound``: a scheduler shows each rank only its own device.
    """
    here = job.layout.world // nodes
    timeout = timedelta(seconds=job.config.fault.timeout)
    if job.layout.world > 1:
        # A single rank does not listen, and may run in its caller's process: what that launches later would take this
        # setting for the user's.
        name_interface(job.config.cluster.interface)
    if job.cluster.device.name == "cpu":
        device = torch.device("cpu")
        backend = "gloo"
        torch.set_num_threads(thread_count(job, here))
    else:
        devices = torch.cuda.device_count()
        if (here > devices and not bound) or job.config.cluster.share:
            # NCCL rejects two ranks on one device of the same host. Different host ids avoid the check.
            os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        if job.layout.pp > 1:
            # By default, 8 hardware queues serve all streams. A receive that waits at the head of a queue would block
            # everything behind it, which may be what its sender is waiting for.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        device = torch.device("cuda", local_rank % devices)
        device_context.take(device)
        backend = job.config.cluster.backend or "nccl"
        if backend == "smddp":
            register_smddp()
    # On a GPU the loss has compiled kernels, even if blocks have none.
    if job.compilation.on or device.type == "cuda":
        use_compile_cache(here)
    bind_to_numa(device, local_rank, here)
    if job.layout.world > 1:
        assert store is not None
        dist.init_process_group(
            backend, store=store.plain, rank=rank, world_size=job.layout.world, timeout=timeout
        )
    return Mesh(job.layout, rank, device, store, timeout, nodes=nodes, domain=job.cluster.apart)


def name_interface(named: str | None) -> None:
    """Tell gloo and NCCL which interface to listen on: by default they use the address that the host's name resolves
    to.
    """
    interface = interface_of(named)
    for variable in INTERFACES:
        os.environ.setdefault(variable, interface)  # the user's own settings take precedence


GIVEN = "OMP_NUM_THREADS"
# A thread pays off from this many FLOPs of a layer's square matmul, 2 · tokens · hidden². Threads wait for each other
# at the end of every operator; if another process has one of the cores, that is a whole time slice. Measured on a
# decoder of 8 layers (benchmarks/results/threads.jsonl), speed of two threads relative to one:
#     1 MFLOP:  0.97 on 2 quiet cores, 0.07 where each core has another process
#    17 MFLOP:  1.3 on 2 quiet cores (tiny at its defaults); 0.15 where four others compute on each
#    67 MFLOP:  1.7 on 2 quiet cores; 4.9 with eight threads on 8 quiet cores
FLOPS_A_THREAD = 10e6


def thread_count(
    job: Job, ranks: int, available: int | None = None, environment: Mapping[str, str] = os.environ
) -> int:
    """Threads for each of the ``ranks`` on this machine. The user's setting wins, except in strict mode, which uses
    one.
    """
    if job.config.run.strict:
        return 1
    given = given_threads(environment)
    if given is not None:
        return given
    share = (available or usable_threads()) // ranks
    return max(1, min(share, int(work(job) // FLOPS_A_THREAD)))


def work(job: Job) -> float:
    """FLOPs of one layer's square matmul, for one micro-batch on one rank."""
    tokens = job.workload().tokens
    return 2.0 * tokens * job.model.hidden**2 / job.layout.tp


def given_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """The value of OMP_NUM_THREADS: ``4``, or ``4,2`` for nested threads. None if it is not usable."""
    first = environment.get(GIVEN, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and len(first) < 6 and int(first) > 0 else None
