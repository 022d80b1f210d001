"""Stages: the best cut against every cut, known models, and who holds what."""

import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.facts.layout import SCHEDULES
from shoal.facts.layout.stages import (
    cut,
    embedding_cost,
    head_cost,
    layer_cost,
    rank_of_stage,
    stages_of_rank,
)
from shoal.facts.model import Experts, Model
from shoal.facts.model.presets import PRESETS
from shoal.facts.problem import BadInput
from shoal.predict.flops import flops_per_token


def small(layers: int, vocab: int = 64, **changes: object) -> Model:
    fields = {
        "name": "small",
        "family": "llama",
        "layers": layers,
        "hidden": 8,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 4,
        "ffn": 16,
        "vocab": vocab,
        "max_positions": 1024,
    }
    return Model.model_validate(fields | changes)


def stage_costs(model: Model, bounds: tuple[int, ...], seq: int) -> list[int]:
    costs = [layer_cost(model, layer, seq) for layer in range(model.layers)]
    costs[0] += embedding_cost(model, seq)
    costs[-1] += head_cost(model, seq)
    return [sum(costs[start:end]) for start, end in pairwise(bounds)]


def lengths(model: Model, count: int, seq: int = 4096) -> list[int]:
    return [len(stage.layers) for stage in cut(model, count, seq)]


@settings(max_examples=60)
@given(st.data())
def test_no_other_cut_is_better(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 9))
    count = data.draw(st.integers(1, layers))
    windowed = tuple(sorted(data.draw(st.sets(st.integers(0, layers - 1)))))
    dense = tuple(sorted(data.draw(st.sets(st.integers(0, layers - 1)))))
    experts = Experts(count=4, active=data.draw(st.integers(1, 4)), ffn=24, dense_layers=dense)
    vocab = data.draw(st.sampled_from([8, 64, 500]))
    model = small(layers, vocab, window=4, window_layers=windowed, experts=experts, family="mixtral")

    stages = cut(model, count, seq=64)

    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.index for stage in stages] == list(range(count))
    assert [stage.first for stage in stages] == [True] + [False] * (count - 1)
    assert [stage.last for stage in stages] == [False] * (count - 1) + [True]
    assert all(len(stage.layers) >= 1 for stage in stages)

    def merit(bounds: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        costs = stage_costs(model, bounds, 64)
        return max(costs), sum(cost**2 for cost in costs), bounds

    every = ((0, *inner, layers) for inner in combinations(range(1, layers), count - 1))
    ours = (0, *(stage.layers.stop for stage in stages))
    assert merit(ours) == min(merit(bounds) for bounds in every)


def test_llama_405b_gives_a_layer_less_to_both_ends_as_its_authors_did() -> None:
    """Llama 3's paper takes one layer each from the first and the last of 16 stages."""
    assert lengths(PRESETS["llama3-405b"], 16, 8192) == [7, *[8] * 14, 7]


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    assert lengths(small(8, vocab=1), 4) == [2, 2, 2, 2]
    heavy = lengths(small(8, vocab=300), 4, seq=16)
    assert heavy[-1] == 1
    assert sum(heavy) == 8


def test_long_sequences_weigh_attention_and_windows_lighten_it() -> None:
    model = small(8, vocab=1, window=16, window_layers=(0, 1, 2, 3))
    assert layer_cost(model, 0, 1024) < layer_cost(model, 7, 1024)
    first, second = lengths(model, 2, 1024)
    assert first > second


@pytest.mark.parametrize(
    "name", ["tiny", "llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "qwen3-32b"]
)
def test_costs_are_the_flops_that_rates_are_counted_in(name: str) -> None:
    model, seq = PRESETS[name], 2048
    forward = sum(layer_cost(model, layer, seq) for layer in range(model.layers)) + head_cost(model, seq)
    assert 3 * forward == pytest.approx(seq * flops_per_token(model, seq), rel=1e-12)


def test_giants_are_cut_in_milliseconds() -> None:
    model = PRESETS["llama3-405b"]
    start = time.process_time()
    stages = cut(model, 64)
    assert time.process_time() - start < 0.1  # measured: 0.005 s
    assert len(stages) == 64


@pytest.mark.parametrize("count", [0, 9])
def test_a_stage_without_a_layer_is_refused(count: int) -> None:
    with pytest.raises(BadInput, match="8 layers") as refused:
        cut(PRESETS["tiny"], count)
    assert "from 1 to 8" in str(refused.value)


@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(2, 4))
def test_every_stage_has_one_rank(schedule: str, pp: int, many: int) -> None:
    chunks = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}.get(schedule, many)
    held = [stages_of_rank(pp, chunks, schedule, rank) for rank in range(pp)]
    assert sorted(stage for stages in held for stage in stages) == list(range(pp * chunks))
    for rank, stages in enumerate(held):
        assert stages == sorted(stages)
        assert [rank_of_stage(pp, chunks, schedule, stage) for stage in stages] == [rank] * chunks


def test_where_stages_live() -> None:
    assert stages_of_rank(4, 1, "1f1b", 2) == [2]
    assert stages_of_rank(4, 3, "interleaved", 1) == [1, 5, 9]
    assert stages_of_rank(4, 1, "zb", 1) == [1]
    assert [stages_of_rank(4, 2, "zbv", rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize(
    ("schedule", "chunks", "told"),
    [
        ("1f1b", 2, "1 chunk"),
        ("zbv", 1, "2 chunks"),
        ("interleaved", 1, "cannot have 1 chunk"),
        ("zb", 0, "cannot have 0 chunk"),
        ("1f1", 1, "did you mean '1f1b'"),
    ],
)
def test_chunks_that_a_schedule_cannot_have(schedule: str, chunks: int, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        stages_of_rank(4, chunks, schedule, 0)
