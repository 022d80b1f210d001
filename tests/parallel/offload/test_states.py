"""Optimizer states that the host has: real ranks against one process."""

from __future__ import annotations

import pytest
from tests.parallel.sharding import GPT2, Case, assert_equal, train
from tests.ranks import run_ranks

ALONE = [
    Case("offload=optimizer", micro_batches=1),
    Case("offload=optimizer", {"tied": True}),
    Case("offload=optimizer:0.5", GPT2, micro_batches=4),
]
WORLD_2 = [
    Case("dp=2,offload=optimizer"),
    Case("fsdp=2,offload=optimizer"),
    Case("fsdp=2,offload=optimizer:0.5", {"tied": True}),
    Case("fsdp=2,zero=2,offload=optimizer"),
    Case("fsdp=2,zero=2,offload=optimizer:0.4", {"tied": True}, micro_batches=4),
    Case("fsdp=2,zero=1,offload=optimizer"),
    Case("tp=2,offload=optimizer"),
    Case("tp=2,sp=0,offload=optimizer:0.5", {"tied": True}),
    Case("pp=2,offload=optimizer", {"tied": True}, micro_batches=4),
    Case("pp=2,schedule=zbv,offload=optimizer:0.5", micro_batches=4),
]
WORLD_4 = [
    Case("dp=2,fsdp=2,offload=optimizer"),
    Case("dp=2,fsdp=2,zero=2,offload=optimizer"),
    Case("fsdp=2,tp=2,offload=optimizer:0.7", {"tied": True}),
    Case("fsdp=2,zero=2,tp=2,offload=optimizer"),
    Case("fsdp=2,pp=2,offload=optimizer", micro_batches=2),
]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.layout)
def test_one_rank_equals_itself(case: Case) -> None:
    assert_equal(case, run_ranks(1, train, case))


@pytest.mark.parametrize("case", WORLD_2, ids=lambda case: case.layout)
def test_two_ranks_equal_one(case: Case) -> None:
    assert_equal(case, run_ranks(2, train, case))


@pytest.mark.parametrize("case", WORLD_4, ids=lambda case: case.layout)
def test_four_ranks_equal_one(case: Case) -> None:
    assert_equal(case, run_ranks(4, train, case))
