"""Sharded optimizer states and gradients: real ranks against one process, memory to the byte, traffic to the call."""

from __future__ import annotations

import pytest
import torch
from tests.parallel.sharding import (
    GPT2,
    Case,
    assert_equal,
    assert_memory,
    gradient_difference,
    measure,
    train,
)
from tests.ranks import run_ranks
from tests.thinned import thinned

from shoal.facts.layout.buckets import buckets_by_kind, even_share, flat_kind
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.traffic import Traffic

WORLD_2 = [
    Case("fsdp=2,zero=1"),
    Case("fsdp=2,zero=2", {"tied": True}, micro_batches=4),
    Case("fsdp=2,zero=1,recompute=full", GPT2, {"bucket_mb": 1e-6}),
    Case("fsdp=2,zero=2,recompute=selective", GPT2, {"bucket_mb": 25}),
    Case("fsdp=2,zero=2", micro_batches=4, strict=True),
]
WORLD_4 = [
    Case("dp=2,fsdp=2,zero=1"),
    Case("dp=2,fsdp=2,zero=2", {"tied": True}),
    Case("fsdp=2,pp=2,zero=1", {"tied": True}, micro_batches=4),
    Case("fsdp=2,pp=2,zero=2,schedule=zbv", {"tied": True}, micro_batches=4),
    # 263 rows over two tensor ranks: their flat buckets differ in size, the norms' must not.
    Case("fsdp=2,tp=2,zero=2", {"qkv_bias": True, "kv_heads": 1, "tied": True}),
]


@pytest.mark.parametrize("case", WORLD_2, ids=lambda case: case.layout)
def test_two_ranks_equal_one(case: Case) -> None:
    assert_equal(case, run_ranks(2, train, case))


@pytest.mark.parametrize("case", thinned(WORLD_4, 2), ids=lambda case: case.layout)
def test_four_ranks_equal_one(case: Case) -> None:
    assert_equal(case, run_ranks(4, train, case))


def chunks_of(case: Case) -> list[int]:
    """The chunk of every bucket, in elements, by facts alone."""
    sizes = {parameter.name: parameter.size for parameter in llama_parameters(case.model)}
    limit = round(case.tune["bucket_mb"] * 2**20)
    cut = buckets_by_kind([(name, size * 8, flat_kind(name, name, 1)) for name, size in sizes.items()], limit)
    return [even_share(sum(sizes[name] for name in names), 2) for names in cut]


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("dp", [1, 2])
def test_memory_and_traffic_are_those_of_the_paper(zero: int, dp: int) -> None:
    case = Case(f"dp={dp},fsdp=2,zero={zero}", {"hidden": 9, "ffn": 21})
    chunks, parameters = chunks_of(case), sum(one.size for one in llama_parameters(case.model))
    assert len(chunks) > 2 and 2 * sum(chunks) > parameters  # several buckets, and some padding
    shard, whole = 8 * sum(chunks), 8 * 2 * sum(chunks)
    results = run_ranks(2 * dp, measure, case)
    assert_memory(results, whole, whole if zero == 1 else shard, 2 * 8 * parameters)
    reductions = 1 if zero == 1 else case.micro_batches
    replicas = [Traffic("all_reduce", "dp", len(chunks), shard)] if dp > 1 else []
    for result in results:
        assert result.traffic == [
            Traffic("all_gather", "fsdp", len(chunks), whole),
            *replicas,
            Traffic("reduce_scatter", "fsdp", len(chunks) * reductions, whole * reductions),
        ]


def test_in_a_pipeline_gradients_are_reduced_once_a_step_and_then_freed() -> None:
    case = Case("fsdp=2,pp=2,zero=2", micro_batches=4)
    for result in run_ranks(4, measure, case):
        counts = {one.op: one.count for one in result.traffic if one.group == "fsdp"}
        assert counts["reduce_scatter"] == counts["all_gather"] > 1
        assert result.memory["grads"] * 2 == result.memory["params"] and result.memory["other"] < 100


@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_may_travel_in_less_precision(zero: int) -> None:
    case = Case(f"dp=2,fsdp=2,zero={zero}", reduce_dtype=torch.bfloat16)
    assert 0 < gradient_difference(case, run_ranks(4, train, case)) < 0.1
