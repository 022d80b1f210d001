"""What the search assumes of bounds, memory and offload holds for random workloads; the long version is a command."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.plan_bounds import Workload, found, too_high

from shoal.facts import calibration
from shoal.facts.calibration import FAST, NETWORK
from shoal.facts.cluster import notation, stack
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import presets
from shoal.facts.recipe import Recipe
from shoal.plan.space import Candidate, ModelSplit, PipelineOrder, RankWork, StateSharding
from shoal.plan.walk import Walk
from shoal.predict.workload import Workload as Question


@pytest.mark.parametrize("seed", range(3))
def test_bounds_are_never_above_what_they_bound(seed: int) -> None:
    """``python benchmarks/plan_bounds.py --cases 20000`` looks at more."""
    assert list(found(seed, cases=60, each=10)) == []


@pytest.mark.parametrize("seed", range(2))
def test_bounds_hold_for_other_stacks(seed: int) -> None:
    others = (stack.MEGATRON_CORE, stack.TITAN_CHUNKED, stack.DEEPSPEED)
    assert list(found(seed, cases=40, each=8, stacks=others)) == []


def test_bounds_hold_for_links_whose_operations_reach_what_was_measured_of_each() -> None:
    """A reduce-scatter at half a ring's rate, as gloo's; an all-reduce slower than its two halves, and a faster one."""
    try:
        for seed, summed in enumerate((0.1, 1.9)):
            apart = {"reduce_scatter": 0.6, "all_gather": 1.7, "all_reduce": summed, "send": 0.8}
            rates = [one.model_copy(update={"operations": apart}) for one in (FAST, NETWORK)]
            for name in ("H100", "H200", "B200", "A100-80GB", "A100-40GB", "cpu"):
                calibration.install_links(name, *rates, path="measured")
            assert list(found(20 + seed, cases=40, each=8)) == []
    finally:
        calibration.forget()


def workload(model: str, on: str, seq: int, batch: int, tune: TuneSection | None = None) -> Workload:
    recipe = Recipe(seq=seq, batch=batch, precision="bf16", reduce="bf16")
    return Workload(
        Question(presets.find(model), notation.find(on), recipe, Layout(), tune=tune or TuneSection())
    )


def test_weight_gradients_put_off_in_several_chunks_are_not_taken_to_be_there() -> None:
    """Three micro-batches of a zero-bubble pipeline of two: at the fullest moment the first chunks have none yet."""
    case = workload("pythia-6.9b", "4x1xH100", 4096, 6)
    one = Candidate(
        ModelSplit(2, 1, 2, 1),
        RankWork(True, "ring", 1, 2),
        PipelineOrder("zb", 2, "selective"),
        StateSharding(1, 1, 3),
        1,
    )
    assert list(too_high(case, one)) == []


def test_replicas_of_shards_add_gradients_up_in_the_precision_of_their_sums() -> None:
    case = workload("pythia-6.9b", "16xH100", 8192, 24)
    one = Candidate(
        ModelSplit(1, 2, 1, 8),
        RankWork(True, "ulysses", 1, 1),
        PipelineOrder("1f1b", 1, "none"),
        StateSharding(8, 1, 3),
        2,
    )
    assert list(too_high(case, one)) == []


def test_where_small_units_stay_gathered_a_larger_one_may_still_fit() -> None:
    case = workload("gpt2", "6x2xH200", 256, 24, TuneSection(persist_below=10**7))
    small = Candidate(
        ModelSplit(1, 1, 1, 12),
        RankWork(True, "ring", 1, 1),
        PipelineOrder("1f1b", 1, "selective"),
        StateSharding(1, 12, 3),
        1,
    )
    large = small._replace(unit=2)
    between = (case.memory(small).device_p90 + case.memory(large).device_p90) // 2
    assert case.memory(large).device_p90 < between < case.memory(small).device_p90
    device = case.asked.cluster.device.model_copy(update={"memory_bytes": between})
    asked = replace(case.asked, cluster=case.asked.cluster.model_copy(update={"device": device}))
    walk = Walk(asked, case.bounds, case.room, case.space)
    assert not walk._fits(walk._priced(small))
    assert walk._too_large(small) and not walk._too_large(large)
    assert walk._fits(walk._priced(large))
