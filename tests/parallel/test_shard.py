"""Fully sharded parameters: real ranks against one process, memory to the byte, traffic to the call."""

from __future__ import annotations

import math

import pytest
import torch
from tests.parallel.sharding import (
    GPT2,
    SEQ,
    Case,
    assert_equal,
    assert_memory,
    gradient_difference,
    measure,
    place,
    steps,
    train,
)
from tests.ranks import run_ranks
from tests.thinned import thinned

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.layout.buckets import Unit, even_share, units
from shoal.facts.layout.stages import cut
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.traffic import Traffic
from shoal.observe.collectives import CollectiveCounter

WORLD_2 = [
    Case("fsdp=2"),
    Case("fsdp=2,unit=2,recompute=full", {"tied": True}, {"prefetch": 2}),
    Case("fsdp=2,unit=3,recompute=selective", GPT2, {"prefetch": 0}),
    Case("fsdp=2", {**GPT2, "tied": False}, {"persist_below": 2000}, micro_batches=4),
    Case("fsdp=2", micro_batches=4, strict=True),
]
WORLD_4 = [
    Case("dp=2,fsdp=2"),
    Case("fsdp=4", {"layers": 2, "tied": True}),
    Case("fsdp=2,tp=2", {"qkv_bias": True, "kv_heads": 1, "tied": True}),
    Case("fsdp=2,pp=2", {"tied": True}, micro_batches=4),
    Case("fsdp=2,pp=2,schedule=zbv,recompute=full", {"tied": True}, micro_batches=4),
    Case("fsdp=2,pp=2,schedule=zb", micro_batches=4),
    Case("fsdp=2,pp=2", micro_batches=4, strict=True),
]


@pytest.mark.parametrize("case", WORLD_2, ids=lambda case: case.layout)
def test_two_ranks_equal_one(case: Case) -> None:
    assert_equal(case, run_ranks(2, train, case))


@pytest.mark.parametrize("case", thinned(WORLD_4, 2), ids=lambda case: case.layout)
def test_four_ranks_equal_one(case: Case) -> None:
    assert_equal(case, run_ranks(4, train, case))


def rows_of(case: Case) -> dict[str, int]:
    """The elements that a rank holds of every parameter, padded rows included."""
    return {
        one.name: even_share(one.shape[0], 2) * math.prod(one.shape[1:])
        for one in llama_parameters(case.model)
    }


def units_of(case: Case) -> list[tuple[Unit, int]]:
    """The units of an unpipelined model, and the elements that a rank holds of each."""
    layout, rows = Layout.parse(case.layout), rows_of(case)
    made = units(range(case.model.layers), layout.unit, True, True, case.model.tied)
    found = [
        (
            unit,
            sum(
                size
                for name, size in rows.items()
                if any(name.startswith(f"{path}.") for path in unit.modules)
            ),
        )
        for unit in made
        if unit.modules != ("",)
    ]
    rest = sum(rows.values()) - sum(size for _, size in found)
    return [(unit, rest) for unit in made if unit.modules == ("",)] + found


CUTS = [
    Case("dp=2,fsdp=2", {"hidden": 9, "ffn": 21}, {}),
    Case("fsdp=2,unit=2,recompute=full", {"hidden": 9, "ffn": 21, "tied": True}, {"prefetch": 3}, 4),
    Case("fsdp=2,unit=3", {**GPT2, "tied": False}, {"prefetch": 0, "persist_below": 2000}),
]


@pytest.mark.parametrize("case", CUTS, ids=lambda case: case.layout)
def test_memory_and_traffic_are_those_of_the_paper(case: Case) -> None:
    sizes, parameters = units_of(case), sum(one.size for one in llama_parameters(case.model))
    layout, tune = Layout.parse(case.layout), TuneSection(**case.tune)
    shard = 8 * sum(size for _, size in sizes)
    assert 2 * shard > 8 * parameters  # some padding
    gathers = [unit.gathers(2 * size, tune.persist_below) * case.micro_batches for unit, size in sizes]
    gathered = sum(2 * 8 * size * often for (_, size), often in zip(sizes, gathers, strict=True))
    replicas = [Traffic("all_reduce", "dp", len(sizes), shard)] if layout.dp > 1 else []
    results = run_ranks(layout.world, measure, case)
    assert_memory(results, shard, shard, 2 * 8 * parameters)
    for result in results:
        assert result.traffic == [
            Traffic("all_gather", "fsdp", sum(gathers), gathered),
            *replicas,
            Traffic(
                "reduce_scatter", "fsdp", len(sizes) * case.micro_batches, 2 * shard * case.micro_batches
            ),
        ]


def test_in_a_pipeline_a_step_gathers_and_reduces_once() -> None:
    case = Case("fsdp=2,pp=2,schedule=zb", {"tied": True}, micro_batches=4)
    stages = cut(case.model, 2, SEQ)
    for rank, result in enumerate(run_ranks(4, measure, case)):
        counts = {one.op: one.count for one in result.traffic if one.group == "fsdp"}
        count = len(stages[rank // 2].layers) + 1  # blocks, and the embedding or the head
        assert counts == {"all_gather": count, "reduce_scatter": count}
        assert result.memory["grads"] == result.memory["params"] and result.memory["other"] < 100


def reduced(rank: int, world: int, schedule: str) -> set[torch.dtype]:
    """The types of gradients whose weights' parts all came after the last backward pass."""
    layout = f"fsdp=2,pp=2,schedule={schedule}"
    case = Case(layout, dtype=torch.float32, compute=torch.bfloat16, micro_batches=2)
    placed, mesh = place(case, rank)
    next(steps(placed, mesh, case, 1))
    return {piece.tensor.grad.dtype for piece in placed.gradients.pieces}


@pytest.mark.parametrize("schedule", ["zb", "zbv"])
def test_few_micro_batches_leave_all_weight_gradients_for_the_end(schedule: str) -> None:
    assert run_ranks(4, reduced, schedule) == [{torch.float32}] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_may_travel_in_another_precision(dtype: torch.dtype) -> None:
    case = Case("dp=2,fsdp=2", reduce_dtype=dtype)
    limit = 0.1 if dtype == torch.bfloat16 else 1e-5
    assert 0 < gradient_difference(case, run_ranks(4, train, case)) < limit


def mixed(rank: int, world: int) -> tuple[set[torch.dtype], set[torch.dtype], list[str]]:
    """Parameters of fp32 that are computed with in bf16."""
    case = Case("fsdp=2", dtype=torch.float32, compute=torch.bfloat16)
    placed, mesh = place(case, rank)
    with CollectiveCounter(mesh.names, log=True) as counter:
        next(steps(placed, mesh, case, 1))
    pieces = placed.gradients.pieces
    sent = [f"{call.op} {call.dtype}" for call in counter.calls]
    return (
        {piece.tensor.dtype for piece in pieces} | {piece.tensor.grad.dtype for piece in pieces},
        {parameter.dtype for parameter in placed.gradients.computed_with()},
        sorted(set(sent)),
    )


def test_parameters_are_gathered_in_the_compute_dtype_and_gradients_summed_in_their_own() -> None:
    held, computed, sent = run_ranks(2, mixed)[0]
    assert held == {torch.float32} and computed == {torch.bfloat16}
    assert sent == ["all_gather bfloat16", "reduce_scatter float32"]
