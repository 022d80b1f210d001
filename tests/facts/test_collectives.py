"""One name for each collective, however it is spelled."""

from __future__ import annotations

import pytest

from shoal.facts.collectives import collective


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_out", "all_gather"),
        ("reduce_scatter_tensor", "reduce_scatter"),
        ("alltoall_base", "all_to_all"),
        ("all_to_all_single", "all_to_all"),
        ("reduce", "reduce"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("isend", "send"),
        ("recv_any_source", "receive"),
        ("monitored_barrier", "barrier"),
        ("broadcast", "broadcast"),
        ("nccl:reduce_scatter", "reduce_scatter"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all_reduce"),
        ("wait_tensor", None),
    ],
)
def test_every_spelling_has_the_one_name(name: str, known: str | None) -> None:
    assert collective(name) == known
