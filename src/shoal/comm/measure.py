"""Time operations between the ranks of the current process group, by size: on gloo or NCCL, on one node or several."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from shoal.comm.operations import TimedCollective, caller

TIMES, WARM_UP = 9, 2


def measure(
    operations: Sequence[str],
    sizes: Sequence[int],
    device: torch.device,
    times: int = TIMES,
    of_calls: Callable[[Iterable[float]], float] = statistics.median,
) -> list[TimedCollective]:
    """Every operation at every size, in bytes of fp32, on every rank of the default group; all ranks get the result.

    A call's time is that of the slowest rank, from a moment when all were ready. The median over calls counts, or
    ``of_calls``.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for size in sizes:
        part = torch.zeros(max(1, size // 4 // ranks), device=device)
        whole = part.new_zeros(part.numel() * ranks)
        for op in operations:
            call = caller(op, rank, ranks, whole, part)
            taken = []
            for _ in range(WARM_UP + times):
                dist.barrier(device_ids=None if device.index is None else [device.index])
                wait(device)
                start = time.perf_counter()
                call()
                wait(device)
                taken.append(time.perf_counter() - start)
            slowest = torch.tensor(taken[WARM_UP:], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds = of_calls(slowest.tolist())
            found.append(TimedCollective(op, ranks, whole.nbytes, seconds / (2 if op == "send" else 1)))
    return found


def wait(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
