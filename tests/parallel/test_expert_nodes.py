"""Experts on several nodes: the run of one process, with nodes that no token reaches, and each token once to a node."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from tests.parallel.sharding import Case, assert_equal, batches, place, train
from tests.ranks import run_ranks
from torch import Tensor

from shoal.facts.layout import Layout
from shoal.facts.layout.expert_nodes import PARTS, expert_nodes
from shoal.facts.model import Experts
from shoal.models import router
from shoal.parallel.token_exchange import TokenExchange

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


def crossings(rank: int, world: int, case: Case) -> list[tuple[int, int, int]]:
    """Of each layer: tokens sent across, nodes of each token's experts by what the router chose, and its experts."""
    placed, mesh = place(case, rank)
    experts = case.model.experts
    assert experts is not None and case.domain is not None
    across = mesh.group_of(expert_nodes(mesh.layout, case.domain, experts.active).across)
    each = experts.count // (mesh.layout.ep // case.domain)
    chosen: list[list[list[int]]] = []
    sent: list[int] = []
    choose, begin = router.choose, TokenExchange.begin

    def noted(wanted: Tensor, given: Experts) -> Tensor:
        found = choose(wanted, given)
        chosen.append(found.flatten(0, -2).tolist())
        return found

    def begun(self: TokenExchange, rows: Tensor, back: bool = False) -> Tensor:
        if self.group is across:
            sent.append(len(rows))
        return begin(self, rows, back)

    (batch,) = batches(case, mesh)
    with patch.object(router, "choose", noted), patch.object(TokenExchange, "begin", begun):
        placed.executor.forward_only([batch])
    nodes = [sum(len({one // each for one in token}) for token in layer) for layer in chosen]
    there_and_back = [sum(sent[first : first + PARTS]) for first in range(0, len(sent), PARTS)]
    return list(zip(there_and_back[::2], nodes, [sum(map(len, layer)) for layer in chosen], strict=True))


@pytest.mark.parametrize("model", [FEW, SHARED], ids=["any node", "one node"])
def test_a_token_crosses_to_each_node_once(model: dict[str, Any]) -> None:
    case = Case("dp=4,ep=4", model, domain=2, micro_batches=1)
    for layers in run_ranks(4, crossings, case):
        assert len(layers) >= 3
        for sent, nodes, copies in layers:
            assert sent == nodes < copies
            assert model is FEW or sent == copies // 3  # what limits a router to a node's experts


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout} on nodes of {case.domain}")
def test_experts_on_several_nodes_equal_one_process(case: Case) -> None:
    assert_equal(case, run_ranks(Layout.parse(case.layout).world, train, case))
