"""The measured operations: how to call each, and how many bytes a rank's link carries for it.

Bandwidths are those of nccl-tests. Algorithm bandwidth is the largest buffer over the time, as a program sees it. Bus
bandwidth is the busiest link's bytes over the time, so that it compares with a datasheet for any operation and number
of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from shoal.comm.renamed import all_gather_single, reduce_scatter_single
from shoal.predict.time.link_fit import TimedCollective as TimedCollective
from shoal.predict.time.link_fit import bus_share as bus_share


def caller(op: str, rank: int, ranks: int, whole: Tensor, part: Tensor) -> Callable[[], object]:
    """One call of an operation; ``part`` is a rank's share of ``whole``.

    Point-to-point goes there and back between the first two ranks, so that one clock times both directions. The root
    of a broadcast or reduce is the last rank: other ranks' clocks see the bytes arrive, or leave.
    """

    def there_and_back() -> None:
        if rank == 0:
            dist.send(whole, 1)
            dist.recv(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    calls: dict[str, Callable[[], object]] = {
        "send": there_and_back,
        "broadcast": lambda: dist.broadcast(whole, ranks - 1),
        "reduce": lambda: dist.reduce(whole, ranks - 1),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather_single(whole, part),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(received, whole),
    }
    received = whole.new_empty(whole.shape if op == "all_to_all" else 0)
    return calls[op]
