"""What the search assumes of bounds, memory and offload holds for random workloads; the long version is a command."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.plan_bounds import Workload, found, too_high

from shoal.facts.cluster import notation
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import presets
from shoal.facts.recipe import Recipe
from shoal.plan.best_first import Walk
from shoal.plan.space import Candidate, ModelSplit, PipelineOrder, StateSharding, WorkShare
from shoal.predict.workload import Workload as Question


@pytest.mark.parametrize("seed", range(3))
def test_bounds_are_never_above_what_they_bound(seed: int) -> None:
    """``python benchmarks/plan_bounds.py --cases 20000`` looks at more."""
    assert list(found(seed, cases=60, each=10)) == []


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
        WorkShare(True, "ring", 1, 2),
        PipelineOrder("zb", 2, "selective"),
        StateSharding(1, 1, 3),
        1,
    )
    assert list(too_high(case, one)) == []


def test_replicas_of_shards_add_gradients_up_in_the_precision_of_their_sums() -> None:
    case = workload("pythia-6.9b", "16xH100", 8192, 24)
    one = Candidate(
        ModelSplit(1, 2, 1, 8),
        WorkShare(True, "ulysses", 1, 1),
        PipelineOrder("1f1b", 1, "none"),
        StateSharding(8, 1, 3),
        2,
    )
    assert list(too_high(case, one)) == []


def test_where_small_units_stay_gathered_a_larger_one_may_still_fit() -> None:
    case = workload("gpt2", "6x2xH200", 256, 24, TuneSection(persist_below=10**7))
    small = Candidate(
        ModelSplit(1, 1, 1, 12),
        WorkShare(True, "ring", 1, 1),
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
