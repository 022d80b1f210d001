"""Compiled blocks with experts on several ranks: the numbers of eager ones, and no graph for other counts of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from tests.predict.sending import ROWS, SEQ, Case
from tests.ranks import run_ranks
from tests.thinned import thinned
from torch import Tensor

from shoal.facts.model import Experts, Latent
from shoal.facts.traffic import Traffic
from shoal.models import router
from shoal.models.initial import fill
from shoal.observe.collectives import CollectiveCounter
from shoal.parallel.experts import mixtures
from shoal.parallel.mesh import Mesh
from shoal.predict.traffic import traffic
from shoal.train.data.loader import Batch
from shoal.train.program import assemble, blueprint

# Widths that torch's grouped product takes.
QWEN3 = {
    "layers": 2, "family": "qwen3_moe", "qk_norm": True, "experts": Experts(count=4, active=2, ffn=8)
}  # fmt: skip
DEEPSEEK = {
    "layers": 3,
    "family": "deepseek_v3",
    "kv_heads": 4,
    "latent": Latent(q_rank=8, kv_rank=8, nope_dim=2, rope_dim=2, value_dim=4),
    "experts": Experts(
        count=4, active=2, ffn=8, shared=1, shared_ffn=8, dense_layers=(0,), router_bias=True,
        groups=2, active_groups=1, score="sigmoid", scale=2.5,
    ),
}  # fmt: skip
# Of four experts three: on two nodes, or on two ranks, some are on each.
THREE = {**QWEN3, "experts": Experts(count=4, active=3, ffn=8)}
RECIPE = {"precision": "bf16", "router_aux": 0.1, "router_z": 0.01}
TWO = [
    Case("dp=2,ep=2,micro=2", QWEN3, RECIPE),
    Case("fsdp=2,ep=2,micro=4,recompute=selective", DEEPSEEK, RECIPE),
    Case("fsdp=2,zero=1,ep=2,micro=4,recompute=full", DEEPSEEK, {**RECIPE, "dropout": 0.1}),
    Case("cp=2,ep=2,micro=4,recompute=selective", QWEN3, RECIPE),
]
FOUR = [
    Case("fsdp=4,ep=2,micro=2,recompute=full", QWEN3, RECIPE),
    Case("dp=2,tp=2,ep=2,micro=4,recompute=selective", DEEPSEEK, RECIPE),
    Case("dp=2,tp=2,ep=2,micro=2,recompute=full", DEEPSEEK, RECIPE),
    Case("dp=2,tp=2,sp=0,ep=2,micro=4,recompute=full", QWEN3, RECIPE),
    Case("fsdp=2,pp=2,ep=2,micro=1", {**QWEN3, "layers": 4}, RECIPE),
    Case("dp=4,ep=4,micro=2", THREE, RECIPE, cluster="2x2xcpu"),
    Case("fsdp=4,ep=4,micro=1,recompute=full", DEEPSEEK, RECIPE, cluster="2x2xcpu"),
]


@dataclass
class Seen:
    losses: list[float]
    weights: list[Tensor]
    traffic: list[Traffic]
    tokens: set[int]  # numbers of tokens that experts here were given
    graphs: list[int]  # compiled so far, after each step
    problem: str | None


# Whether every expert is chosen as often as the others, which is what predictions take it for. A tensor, so that graphs
# read it: nothing is compiled again for it.
EVEN = torch.tensor(False)
own_choice = router.choose


def choose(scores: Tensor, experts: Experts) -> Tensor:
    """As ``router.choose``, or evenly."""
    tokens, k = scores.shape[-2], experts.active
    numbers = torch.arange(tokens, device=scores.device)[:, None] * k + torch.arange(k, device=scores.device)
    return torch.where(EVEN, numbers % experts.count, own_choice(scores, experts))


def work(rank: int, world: int, cases: list[Case]) -> list[Seen]:
    with patch.object(router, "choose", choose):
        return [one_case(rank, case) for case in cases]


def one_case(rank: int, case: Case) -> Seen:
    """Steps whose tokens, and so their experts, differ, with an evaluation after the second; a last one is counted."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    EVEN.fill_(False)
    workload = case.workload
    model, recipe, layout = workload.model, workload.recipe, workload.layout
    mesh = Mesh(layout, rank, torch.device("cpu"), domain=workload.cluster.apart)
    step = assemble(
        blueprint(model, recipe),
        recipe,
        workload.tune,
        mesh,
        partial(fill, model=model, seed=0),
        compile_with="aot_eager" if case.compiled else None,
    )
    seen = Seen([], [], [], set(), [], None)
    for segment in step.placed.segments:
        for mixture in mixtures(segment):
            mixture.experts.register_forward_pre_hook(
                lambda _, given: seen.tokens.add(sum(map(len, given[0])))
            )
    share = ROWS // layout.data_ranks
    first = mesh.data_index * share

    def take(number: int) -> list[Batch]:
        """A step. Its rows."""
        batches = [
            rows(model.vocab, number, one, workload.micro)
            for one in range(first, first + share, workload.micro)
        ]
        step.agree(ROWS * SEQ)
        seen.losses.append(step(number, batches, ROWS * SEQ).loss)
        return batches

    for number in range(1, 5):
        batches = take(number)
        if number == 2:
            step.placed.executor.forward_only([step._micro_batch(0, batch) for batch in batches])
        seen.graphs.append(counters["stats"]["unique_graphs"])
    seen.weights = [piece.tensor.detach().clone() for piece in step.pieces]
    EVEN.fill_(True)
    with CollectiveCounter(mesh.names) as counter:
        take(5)
    seen.traffic = counter.traffic()
    seen.graphs.append(counters["stats"]["unique_graphs"])
    seen.problem = step.placed.compiled.problem if step.placed.compiled is not None else None
    return seen


def rows(vocabulary: int, step: int, first: int, number: int) -> Batch:
    tokens = torch.arange(SEQ) * (5 + step) + torch.arange(first, first + number)[:, None] * (11 + step)
    tokens = tokens % vocabulary
    positions = torch.arange(SEQ).repeat(number, 1)
    return Batch(
        tokens, tokens.roll(-1, 1), positions, None, torch.arange(first, first + number), number * SEQ
    )


def graphs(case: Case) -> int:
    """Way in, experts, their sum and, unless all is repeated, the way out; shared experts and blocks without any."""
    model, recompute = case.workload.model, case.workload.layout.recompute
    # Sums of tokens from several nodes, whose number is another each time, are made outside of graphs.
    return 3 - bool(case.cluster) + (recompute != "full") + 2 * bool(model.experts and model.experts.shared)


# Two layouts at a time: all of them would take minutes on a busy machine, and ranks don't wait that long.
GROUPS = [
    (world, cases[first : first + 2])
    for world, cases in ((2, TWO), (4, FOUR))
    for first in range(0, len(cases), 2)
]


@pytest.mark.long
@pytest.mark.parametrize(("world", "cases"), thinned(GROUPS, 3), ids=lambda value: str(value)[:60])
def test_numbers_graphs_and_traffic(world: int, cases: list[Case]) -> None:
    compiled = [replace(case, compiled=True) for case in cases]
    for rank, found in enumerate(run_ranks(world, work, [*cases, *compiled])):
        for case, eager, seen in zip(compiled, found, found[len(cases) :], strict=False):
            assert seen.problem is None, (case, seen.problem)
            assert seen.losses == eager.losses, case
            for ours, theirs in zip(seen.weights, eager.weights, strict=True):
                assert torch.equal(ours, theirs), case
            # Numbers of tokens differ from step to step, and need no other graph. (A pipeline compiles with rows of
            # its own. And with three of four experts every token goes to both nodes, where its copies differ.)
            assert seen.tokens >= eager.tokens and (len(eager.tokens) > 2 or case.model is THREE), case
            assert seen.graphs == [graphs(case)] + [2 * graphs(case)] * 4, case
            assert sorted(seen.traffic) == sorted(traffic(case.workload, rank)), case
