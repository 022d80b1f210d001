"""The ring all-reduce: the library's sum, and exactly 2(N-1)/N of the buffer sent by every rank, as torch counts it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from shoal.comm.ring import parts, ring_all_reduce, show_ring
from shoal.observe.collectives import CollectiveCounter

ELEMENTS = 12 * 7


def summed(rank: int, world: int) -> tuple[float, int, int, bool]:
    generator = torch.Generator().manual_seed(rank)
    buffer = torch.randn(ELEMENTS, dtype=torch.float64, generator=generator)
    library = buffer.clone()
    dist.all_reduce(library)
    with CollectiveCounter() as counter:
        ring_all_reduce(buffer)
    sent = sum(row.bytes for row in counter.traffic() if row.op == "send")
    shown = show_ring(torch.device("cpu"))
    # In the end every rank's every chunk has all ranks' parts.
    whole = all(parts(value) == list(range(world)) for value in shown.steps[-1].chunks)
    assert shown.equal and shown.sent_bytes == 2 * (world - 1) * shown.buffer_bytes // world
    # What a rank receives in a step is what the one before it sends.
    for step in shown.steps:
        assert step.received == (step.sent - 1) % world
    return float((buffer - library).abs().max()), sent, buffer.nbytes, whole


@pytest.mark.parametrize("world", [2, 3, 4])
def test_it_is_the_librarys_sum_and_sends_what_the_formula_says(world: int) -> None:
    for difference, sent, size, whole in run_ranks(world, summed):
        assert difference < 1e-14 * world and whole
        assert sent * world == 2 * (world - 1) * size


def ragged(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match="5 elements") as refused:
        ring_all_reduce(torch.zeros(5))
    return str(refused.value)


def test_a_buffer_that_cannot_be_cut_is_refused() -> None:
    assert "a multiple of 2 ranks" in run_ranks(2, ragged)[0]
