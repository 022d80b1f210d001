"""A ring all-reduce on send and receive, written for reading.

Each of N ranks splits its buffer into N chunks and communicates only with its two neighbours: it sends to the next
rank while it receives from the previous one.

1. Reduce-scatter, N - 1 steps. A chunk travels round the ring, and every rank that it passes adds its own part. In step
   s rank r sends chunk r - s and receives chunk r - s - 1, modulo N. After the last step rank r holds the complete sum
   of chunk r + 1.
2. All-gather, N - 1 steps. The complete chunks travel round the same ring and replace what is there.

So a rank sends 2 (N - 1) chunks of 1/N: 2 (N - 1) / N of the buffer, almost independent of N. No algorithm sends less,
and none keeps all links busier, which is why bandwidth hardly depends on the number of ranks. Latency does: there are
2 (N - 1) messages, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class RingStep(NamedTuple):
    """What one rank did in one step, and its chunks after it (the first element of each)."""

    phase: str
    step: int
    sent: int  # the chunk sent to the next rank
    received: int  # the chunk received from the previous rank
    chunks: tuple[float, ...]
    bytes: int  # sent in this step


def ring_all_reduce(buffer: Tensor, watch: Callable[[RingStep], None] | None = None) -> None:
    """Sum ``buffer`` over the default group, in place. ``watch`` is called with every step.

    The number of ranks must divide its elements: the caller pads, and padding is sent as well.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if buffer.numel() % ranks or not buffer.is_contiguous():
        raise ValueError(f"{buffer.numel()} elements: they must be contiguous, a multiple of {ranks} ranks")
    chunks = buffer.view(-1).chunk(ranks)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    arriving = torch.empty_like(chunks[0])
    for phase, ahead in (("reduce-scatter", 0), ("all-gather", 1)):
        for step in range(ranks - 1):
            sent, received = (rank + ahead - step) % ranks, (rank + ahead - step - 1) % ranks
            both = [
                dist.P2POp(dist.isend, chunks[sent], after),
                dist.P2POp(dist.irecv, arriving, before),
            ]
            for message in dist.batch_isend_irecv(both):
                message.wait()
            if phase == "reduce-scatter":
                chunks[received].add_(arriving)
            else:
                chunks[received].copy_(arriving)
            if watch is not None:
                held = tuple(chunk[0].item() for chunk in chunks)
                watch(RingStep(phase, step, sent, received, held, chunks[sent].nbytes))


class ShownRing(NamedTuple):
    """One rank's ring all-reduce of a buffer that shows which ranks' parts a sum contains."""

    steps: list[RingStep]
    buffer_bytes: int
    sent_bytes: int
    equal: bool  # to the library's sum, bit by bit


def show_ring(device: torch.device) -> ShownRing:
    """Rank r's buffer is filled with 2^r, so a partial sum tells whose parts it has: 5 is ranks 0 and 2.

    Such sums are exact in any order, so the library's result must be identical.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    buffer = torch.full((ranks * 4,), 2.0**rank, dtype=torch.float64, device=device)
    library = buffer.clone()
    dist.all_reduce(library)
    steps: list[RingStep] = []
    ring_all_reduce(buffer, steps.append)
    sent = sum(step.bytes for step in steps)
    return ShownRing(steps, buffer.nbytes, sent, torch.equal(buffer, library))


def parts(value: float) -> list[int]:
    """The ranks whose parts are in a sum of ``show_ring``."""
    bits = int(value)
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
