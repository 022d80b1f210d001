"""Experts on several nodes: the run of one process, with nodes that no token reaches, and each token once to a node."""

from __future__ import annotations

import pytest
from tests.parallel.sharding import Case, assert_equal, train
from tests.ranks import run_ranks

from shoal.facts.layout import Layout
from shoal.facts.model import Experts

FEW = {"family": "qwen3_moe", "experts": Experts(count=8, active=3, ffn=10)}
# Far more than there are tokens: most have none, and so have ranks and nodes.
MANY = {"family": "qwen3_moe", "experts": Experts(count=64, active=2, ffn=4)}
# As DeepSeek-V3: every token uses one more expert, and its own are on one of two nodes.
SHARED = {
    "family": "deepseek_v3",
    "experts": Experts(
        count=8, active=3, ffn=10, shared=1, shared_ffn=10, dense_layers=(0,),
        groups=2, active_groups=1, score="sigmoid", scale=2.5,
    ),
}  # fmt: skip
CASES = [
    Case("dp=4,ep=4", FEW, domain=2),
    Case("fsdp=4,ep=4,recompute=full", SHARED, domain=2),
    Case("fsdp=4,ep=4", MANY, domain=1, micro_batches=1),
    Case("fsdp=2,tp=2,ep=2", SHARED, domain=2, micro_batches=4),
    Case("fsdp=2,zero=1,pp=2,ep=2", FEW, domain=1, micro_batches=4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout} on nodes of {case.domain}")
def test_experts_on_several_nodes_equal_one_process(case: Case) -> None:
    assert_equal(case, run_ranks(Layout.parse(case.layout).world, train, case))
