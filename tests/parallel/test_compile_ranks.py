"""Compiled blocks on real ranks: gradients as of eager ones, traffic as predicted, and nothing compiled twice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from tests.predict.sending import GEMMA2, NEOX, QWEN2, ROWS, SEQ, Case
from tests.ranks import run_ranks
from torch import Tensor

from shoal.facts.traffic import Traffic
from shoal.models.documents import Documents
from shoal.models.initial import fill
from shoal.observe.collectives import CollectiveCounter
from shoal.parallel.deferred import Deferred
from shoal.parallel.mesh import Mesh
from shoal.predict.traffic import traffic
from shoal.train.data.loader import Batch
from shoal.train.program import assemble, blueprint

# Two layers, where a third would only take longer; a pipeline has one in each stage.
SMALL = {"layers": 2}
DROPOUT = {"dropout": 0.1}
CASES = [
    Case("fsdp=2,micro=2,recompute=selective", SMALL, DROPOUT),
    Case("tp=2,micro=8,recompute=full", SMALL, DROPOUT),
    Case("tp=2,sp=0,micro=8,recompute=selective", {**SMALL, **NEOX}, DROPOUT),
    Case("pp=2,micro=2", SMALL, DROPOUT),
    # Backward passes in two parts: the second is computed outside of graphs.
    Case("pp=2,schedule=zb,micro=2,recompute=selective", {**SMALL, **QWEN2}, DROPOUT),
    Case("pp=2,schedule=zbv,micro=2", {"layers": 4, **NEOX}, {}),
    Case("tp=2,micro=8,recompute=full", {**SMALL, **GEMMA2, "window_layers": None}, {}),
    Case("cp=2,micro=4,recompute=selective", SMALL, DROPOUT),
    Case("cp=2,cp_kind=ulysses,micro=4", SMALL, DROPOUT),
]


@dataclass
class Seen:
    losses: list[float]
    gradients: list[Tensor]
    traffic: list[Traffic]
    graphs: list[int]  # compiled so far, after each step
    problem: str | None
    deferred: int  # weight gradients that the schedule computed apart


def work(rank: int, world: int, cases: list[Case]) -> list[Seen]:
    return [one_case(rank, case) for case in cases]


def one_case(rank: int, case: Case) -> Seen:
    """Three steps and, after the second, whose traffic is counted, an evaluation whose last rows are fewer."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    workload = case.workload
    model, recipe, layout = workload.model, workload.recipe, workload.layout
    mesh = Mesh(layout, rank, torch.device("cpu"))
    first = partial(fill, model=model, seed=0)
    step = assemble(
        blueprint(model, recipe),
        recipe,
        workload.tune,
        mesh,
        first,
        compile_with="aot_eager" if case.compiled else None,
    )
    share = ROWS // layout.data_ranks
    start = mesh.data_index * share
    batches = [
        packed(model.vocab, one, workload.micro) for one in range(start, start + share, workload.micro)
    ]
    seen = Seen([], [], [], [], None, 0)
    for number in (1, 2, 3):
        if number == 2:
            deferred = count_deferred(step.placed.executor.deferred)
        with CollectiveCounter(mesh.names) as counter:
            step.agree(ROWS * SEQ)
            seen.losses.append(float(step.compute_gradients(number, batches, ROWS * SEQ)[0]))
        if number == 2:
            seen.traffic = counter.traffic()
        if number > 1:
            for count in (workload.micro, 1, 1):
                step.placed.executor.forward_only([step._micro_batch(0, packed(model.vocab, 0, count))])
        seen.graphs.append(counters["stats"]["unique_graphs"])
    seen.gradients = [piece.tensor.grad.clone() for piece in step.pieces if piece.tensor.grad is not None]
    seen.problem = step.placed.compiled.problem if step.placed.compiled is not None else None
    seen.deferred = sum(deferred)
    return seen


def count_deferred(deferred: Deferred | None) -> list[int]:
    """A list that grows by the number of weight gradients whenever a pass computes those that were deferred."""
    counts: list[int] = []
    if deferred is not None:
        compute = deferred.compute

        def counted(stage: int, micro: int) -> None:
            counts.append(len(deferred.heaps[stage, micro]))
            compute(stage, micro)

        deferred.compute = counted  # type: ignore[method-assign]
    return counts


def packed(vocabulary: int, first: int, number: int) -> Batch:
    """Rows of several documents, each other ones."""
    tokens = (torch.arange(SEQ) * 7 + torch.arange(first, first + number)[:, None] * 13) % vocabulary
    positions = torch.arange(SEQ).repeat(number, 1)
    documents = Documents.of((positions + torch.arange(number)[:, None]) // 3)
    return Batch(
        tokens, tokens.roll(-1, 1), positions, documents, torch.arange(first, first + number), number * SEQ
    )


@pytest.mark.long
def test_gradients_traffic_and_graphs() -> None:
    compiled = [replace(case, compiled=True) for case in CASES]
    for rank, found in enumerate(run_ranks(2, work, [*CASES, *compiled])):
        for case, eager, seen in zip(compiled, found, found[len(CASES) :], strict=False):
            assert seen.problem is None, case
            assert seen.deferred == eager.deferred, case
            assert bool(seen.deferred) == ("schedule=zb" in case.layout), case
            torch.testing.assert_close(seen.losses, eager.losses, rtol=1e-6, atol=0)
            largest = max(float(one.abs().max()) for one in eager.gradients)
            for ours, theirs in zip(seen.gradients, eager.gradients, strict=True):
                # A gradient that is nothing but rounding is measured against the others.
                scale = max(float(theirs.abs().max()), 1e-3 * largest)
                assert float((ours - theirs).abs().max()) <= 1e-6 * scale, case
            # One graph for all layers, and one without gradients; nothing after the first step and evaluation.
            assert seen.graphs == [1, 2, 2], case
            assert sorted(seen.traffic) == sorted(traffic(case.workload, rank)), case
