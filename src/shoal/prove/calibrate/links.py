"""Time collectives between this machine's ranks: latency and bandwidth by operation and size."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from shoal.facts.calibration import LinkRates
from shoal.facts.cluster.this_machine import usable_threads
from shoal.launch.init_rank import given_threads
from shoal.launch.interfaces import LOOPBACK_INTERFACE
from shoal.launch.local import PRELOAD, warm_workers
from shoal.launch.ranks import run_ranks
from shoal.parallel.signed_store import SignedStore
from shoal.parallel.tensor_region import all_gather_single, reduce_scatter_single
from shoal.predict.time.links import ROUNDS
from shoal.prove.calibrate.sampling import wait

SMALL, LARGE = 2**12, {"nccl": 2**28, "gloo": 2**23}
TIMES = 9
PATIENCE = 90.0
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send")


class TimedCollective(NamedTuple):
    """One operation over a buffer of so many bytes."""

    op: str
    bytes: int
    seconds: float


def links(devices: int, on_cpu: bool) -> LinkRates | None:
    """None where there is no peer."""
    world = 2 if on_cpu else devices
    if world < 2:
        return None
    backend = "gloo" if on_cpu else "nccl"
    warm_workers((*PRELOAD, "shoal.prove.calibrate.links"))
    calls = run_ranks(world, measure, (backend,), PATIENCE)[0]
    return fitted(calls, world, f"{backend}, {world} ranks of this machine")


def measure(rank: int, world: int, store: SignedStore, backend: str) -> list[TimedCollective]:
    """One rank's part."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(given_threads() or max(1, usable_threads() // world))
    timeout = timedelta(seconds=PATIENCE)
    dist.init_process_group(backend, store=store.plain, rank=rank, world_size=world, timeout=timeout)
    found = []
    for size in (SMALL, LARGE[backend] // 16, LARGE[backend]):
        elements = size // 4 // world * world
        whole, part = torch.zeros(elements, device=device), torch.zeros(elements // world, device=device)
        for op in OPERATIONS:
            run = _call(op, rank, whole, part)
            taken = []
            for _ in range(TIMES):
                dist.barrier(device_ids=None if device.index is None else [device.index])
                wait(device)
                start = time.perf_counter()
                run()
                wait(device)
                taken.append(time.perf_counter() - start)
            found.append(TimedCollective(op, whole.nbytes, statistics.median(taken[2:])))
    return found


def _call(op: str, rank: int, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
    """Between the first two ranks, where it is a message: there and back, so that one clock sees both."""

    def message() -> None:
        if rank == 0:
            dist.send(whole, 1)
            dist.recv(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather_single(whole, part),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole),
        "send": message,
    }[op]


def fitted(calls: list[TimedCollective], world: int, source: str) -> LinkRates:
    """Small messages give the latency: of one start and, for each rank that is passed, a hop. Large ones the rate."""
    sizes = [call.bytes for call in calls]
    small, large = (
        {call.op: call for call in calls if call.bytes == size} for size in (min(sizes), max(sizes))
    )
    latency = {op: small[op].seconds / (2 if op == "send" else 1) for op in OPERATIONS}
    passes = {op: ROUNDS.get(op, 1.0) * (world - 1 if op in ROUNDS else 1) for op in OPERATIONS}
    between = passes["all_reduce"] - passes["all_gather"]
    hop = max(0.0, (latency["all_reduce"] - latency["all_gather"]) / between)
    start = max(0.0, statistics.median(latency[op] - passes[op] * hop for op in OPERATIONS))
    rates = []
    for op, call in large.items():
        moved = call.bytes * (2.0 if op == "send" else ROUNDS[op] * (world - 1) / world)
        rates.append(moved / max(1e-9, call.seconds - small[op].seconds))
    return LinkRates(share=1.0, hop=hop, start=start, bandwidth=statistics.median(rates), source=source)
