"""Dry runs of worlds that no one has at hand, within a minute of computing; and the same layouts in small."""

from __future__ import annotations

import time

import pytest
import torch
from tests.predict.counted import ask
from tests.prove.test_experts import SHAPES

from shoal.facts.cluster.notation import find
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.workload import Workload
from shoal.prove.dryrun import dryrun, fullest_rank
from shoal.prove.fake_world import without_data

MINUTE = 60.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "layout", "seq", "batch"),
    [
        # As DeepSeek trained it, and 16 of its micro-batches.
        ("deepseek-v3", "fsdp=128,zero=1,pp=16,ep=64,micro=1", 4096, 2048),
        ("llama3-8b", "fsdp=2,cp=32,cp_kind=ulysses,recompute=full", 1_048_576, 2),
    ],
)
def test_a_large_world_takes_less_than_a_minute(preset: str, layout: str, seq: int, batch: int) -> None:
    parsed = Layout.parse(layout)
    workload = Workload(
        PRESETS[preset], find(f"{parsed.world}xH100"), Recipe(seq=seq, batch=batch, steps=1), parsed
    )
    began = time.process_time()
    found = dryrun(workload, fullest_rank(workload))
    assert time.process_time() - began < MINUTE
    assert found.matches and found.findings == []


def test_deepseeks_layout_in_small() -> None:
    workload = ask(
        "fsdp=4,zero=1,pp=2,ep=2,micro=1", {**SHAPES["deepseek_v3"], "layers": 4}, precision="bf16", batch=16
    )
    for stage in range(2):
        found = dryrun(workload, 4 * stage)
        assert found.matches
        assert found.memory.peak_allocated == pytest.approx(found.predicted.peak_allocated, rel=0.015)


# The first one's peak is in the loss, those of the others in a block.
EXPERTS_SHARDED = [
    ("qwen3-30b-a3b", "fsdp=64,ep=8,micro=1"),
    ("mixtral-8x7b", "fsdp=64,ep=8,micro=1,recompute=selective"),
    # Experts' buckets travel beside those of all else; also where the same ranks share both.
    ("mixtral-8x7b", "fsdp=64,zero=2,micro=1"),
    ("mixtral-8x7b", "fsdp=64,zero=2,ep=8,micro=1,recompute=full"),
    # A gathered gradient; ways in that are sharded whole, and ways out within experts.
    ("mixtral-8x7b", "fsdp=16,tp=4,micro=1"),
    # Tokens in two parts; tokens of split features; experts that no other rank has, and shared ones beside them.
    ("mixtral-8x7b", "fsdp=32,tp=2,ep=8,micro=1,recompute=selective"),
    ("qwen3-30b-a3b", "fsdp=8,tp=4,ep=2,micro=1,recompute=full"),
    ("mixtral-8x7b", "fsdp=8,zero=2,ep=8,micro=1"),
    ("deepseek-v3", "fsdp=8,tp=2,sp=0,ep=8,micro=1,recompute=full"),
    pytest.param("mixtral-8x7b", "fsdp=64,ep=4,micro=1", marks=pytest.mark.long),
    pytest.param("qwen3-30b-a3b", "fsdp=8,pp=8,ep=8,micro=1", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("preset", "layout"), EXPERTS_SHARDED)
def test_experts_in_shards_at_their_true_widths(preset: str, layout: str) -> None:
    """Three blocks of each stage: what one of them holds is not lost among the others."""
    parsed = Layout.parse(layout)
    experts = PRESETS[preset].experts
    assert experts is not None
    model = PRESETS[preset].model_copy(update={"layers": 3 * parsed.pp + len(experts.dense_layers)})
    recipe = Recipe(seq=4096, batch=64, steps=1, precision="bf16")
    workload = Workload(model, find(f"{parsed.world}xH100"), recipe, parsed)
    found = dryrun(workload, fullest_rank(workload))
    assert found.matches
    # A sigmoid's router saves a few scores more than the ledger has.
    near = 0.003 if experts.score == "sigmoid" else 0.0015
    for category in ("peak_allocated", "activations", "buffers"):
        ours, theirs = getattr(found.memory, category), getattr(found.predicted, category)
        assert ours == pytest.approx(theirs, rel=near), category


@pytest.mark.parametrize("layout", ["micro=4,recompute=full,offload=params", "fsdp=2,tp=2,micro=4"])
def test_the_loss_of_more_tokens_than_pass_at_once(layout: str) -> None:
    """The head's weight gradient adds up over chunks of tokens: a buffer, and none of the logits."""
    parsed = Layout.parse(layout)
    model = PRESETS["llama3.2-1b"].model_copy(update={"layers": 2})
    recipe = Recipe(seq=8192, batch=4 * parsed.fsdp, steps=1, precision="bf16")
    found = dryrun(Workload(model, find(f"{parsed.world}xH100"), recipe, parsed), 0)
    assert found.matches and found.findings == []


@pytest.mark.parametrize("layout", ["pp=2,micro=1", "pp=2,tp=2,micro=1"])
def test_the_gradient_of_a_large_table(layout: str) -> None:
    """While it is widened, the gradient that it was computed from is there too: the peak of a first stage."""
    parsed = Layout.parse(layout)
    model = PRESETS["llama3-8b"].model_copy(update={"layers": 2})
    workload = Workload(model, find(f"{parsed.world}xH100"), Recipe(seq=1024, batch=4, steps=1), parsed)
    found = dryrun(workload, 0)
    assert found.memory.instant.endswith("of embed_tokens") and found.matches and found.findings == []


def test_long_sequences_in_small() -> None:
    """Ulysses over more ranks than there are key/value heads, with everything sharded and recomputed."""
    workload = ask(
        "fsdp=2,cp=8,cp_kind=ulysses,recompute=full", {"kv_heads": 2}, seq=4096, batch=2, precision="bf16"
    )
    found = dryrun(workload, fullest_rank(workload))
    assert found.matches and found.differences(0) == []


def test_numbers_are_read_off_a_tensor_without_data_all_at_once() -> None:
    with without_data():
        assert torch.empty(2, 3).tolist() == [[1.0] * 3] * 2
        assert torch.empty(2, dtype=torch.int64).tolist() == [1, 1]
        assert torch.empty(()).tolist() == 1.0
