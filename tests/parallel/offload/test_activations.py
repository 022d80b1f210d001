"""Activations that wait in the host's memory: real ranks against one process."""

from __future__ import annotations

import pytest
from tests.parallel.sharding import GPT2, Case, assert_equal, train
from tests.ranks import run_ranks

ALONE = [
    Case("recompute=full,offload=activations", micro_batches=1),
    Case("recompute=selective,offload=activations:0.5"),
    Case("recompute=selective,offload=activations", GPT2),
]
WORLD_2 = [
    Case("dp=2,recompute=full,offload=activations"),
    Case("fsdp=2,recompute=full,offload=activations:0.5"),
    Case("fsdp=2,recompute=selective,offload=activations", {"tied": True}),
    Case("fsdp=2,zero=2,recompute=selective,offload=activations"),
    Case("tp=2,recompute=full,offload=activations"),
    Case("tp=2,sp=0,recompute=selective,offload=activations"),
    Case("cp=2,recompute=selective,offload=activations"),
    Case("pp=2,recompute=full,offload=activations", micro_batches=4),
    Case("pp=2,schedule=zb,recompute=selective,offload=activations", micro_batches=4),
    Case("pp=2,schedule=zbv,recompute=full,offload=activations", micro_batches=4),
]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.layout)
def test_one_rank_equals_itself(case: Case) -> None:
    assert_equal(case, run_ranks(1, train, case))


@pytest.mark.parametrize("case", WORLD_2, ids=lambda case: case.layout)
def test_two_ranks_equal_one(case: Case) -> None:
    assert_equal(case, run_ranks(2, train, case))
