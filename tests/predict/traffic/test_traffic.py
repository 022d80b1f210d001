"""Announced traffic against counted traffic: every rank of real worlds, operation by operation and byte by byte."""

from __future__ import annotations

import pytest
from tests.predict.sending import GPT2, NEOX, QWEN2, QWEN3, SHARED_HEADS, TIED, Case, count
from tests.ranks import run_ranks
from tests.thinned import thinned

from shoal.facts import logits
from shoal.predict.traffic import traffic

BF16 = {"precision": "bf16"}
FP64 = {"precision": "fp64"}
DROPOUT = {"dropout": 0.1}
FP8 = {"precision": "fp8"}
ROWWISE = {**FP8, "fp8": "rowwise"}
TWO = {"layers": 2}  # where more of them would only be compiled longer
TILES = {"hidden": 32, "head_dim": 16, "ffn": 64, "layers": 3}

WORLD_2 = [
    # replicas
    Case("dp=2"),
    Case("dp=2,micro=1", GPT2, {"reduce": "bf16"}, {"bucket_mb": 25}),
    Case("dp=2", QWEN2, {"states": "bf16", "clip": 0.0}),
    # sharded states and gradients
    Case("fsdp=2,zero=1", TIED, {"reduce": "bf16", "clip": 0.0}),
    Case("fsdp=2,zero=1,recompute=selective", GPT2, FP64),
    Case("fsdp=2,zero=2,micro=2", QWEN3, {**BF16, "states": "bf16"}),
    # sharded parameters
    Case("fsdp=2", TIED, BF16),
    Case("fsdp=2,unit=3,recompute=full", GPT2, {"reduce": "bf16"}),
    Case("fsdp=2,micro=1", {**GPT2, "tied": False}, tune={"persist_below": 500, "prefetch": 0}),
    Case("fsdp=2,unit=2", TIED, tune={"persist_below": 5000}),
    Case("fsdp=2", QWEN2, {"precision": "fp16"}),
    # tensor
    Case("tp=2", GPT2, BF16),
    Case("tp=2,sp=0", QWEN3),
    Case("tp=2,recompute=full", NEOX),
    Case("tp=2,recompute=selective", QWEN3, FP64),
    Case("tp=2,recompute=full", QWEN2, DROPOUT),
    Case("tp=2,sp=0,recompute=selective", SHARED_HEADS, DROPOUT),
    Case("tp=2,micro=2", SHARED_HEADS, logits_at_once=31 * 5),  # chunks of 5 tokens, and one left
    Case("tp=2,micro=4", TIED, FP64, logits_at_once=31 * 16),  # two whole chunks
    # pipeline
    Case("pp=2", TIED, BF16),
    Case("pp=2,micro=8"),
    Case("pp=2,schedule=gpipe", QWEN2),
    Case("pp=2,schedule=interleaved,recompute=full", GPT2, FP64),
    Case("pp=2,schedule=interleaved,chunks=4", {"layers": 8}),
    Case("pp=2,schedule=zb,chunks=2", TIED),
    Case("pp=2,schedule=zbv", GPT2),
    Case("pp=2,schedule=dualpipev", {"layers": 7}),
    # scales of weights in fp8, and weights gathered in it
    Case("fsdp=2,micro=2,recompute=full", TILES, FP8),
    Case("fsdp=2,zero=1,micro=2", TILES, ROWWISE),
    Case("fsdp=2,micro=2", {**TILES, **GPT2}, ROWWISE),
    Case("tp=2,micro=2", TILES, FP8),
    Case("pp=2,micro=2", TILES, FP8),
    Case("cp=2,micro=2", QWEN3, BF16),
    Case("cp=2,zero=1,recompute=full", {**TIED, "window": 3}),
    Case("cp=2,cp_kind=ulysses,zero=2,micro=4,recompute=selective", SHARED_HEADS),
    Case("cp=2,cp_kind=ulysses", GPT2),
    Case("cp=2,recompute=selective", TWO, compiled=True),
    Case("cp=2,cp_kind=ulysses,zero=2,recompute=full", TWO, compiled=True),
    Case("cp=2", TWO, compiled=True),
    Case("cp=2,zero=1,recompute=full", TWO, compiled=True),
    Case("cp=2,cp_kind=ulysses,recompute=selective", TWO, compiled=True),
]
WORLD_4 = [
    Case("fsdp=2,tp=2,micro=2", {**TILES, **QWEN2}, ROWWISE),
    Case("fsdp=2,pp=2,micro=2", TILES, FP8),
    Case("dp=2,fsdp=2,micro=2", {**TILES, **GPT2}, FP8),
    Case("tp=4", {"vocab": 9, **SHARED_HEADS, **TIED}),  # nine rows: the last rank has none
    Case("tp=4,sp=0,recompute=selective", {**QWEN3, "kv_heads": 2}),
    Case("fsdp=4", {"vocab": 3, "layers": 2, "hidden": 2, "ffn": 3}),  # fewer rows than ranks
    Case("fsdp=2,tp=2", {**QWEN2, "vocab": 5}),
    Case("fsdp=2,zero=1,tp=2", {**QWEN2, **SHARED_HEADS}),
    Case("fsdp=2,zero=2,tp=2,sp=0,micro=2", {**QWEN3, **SHARED_HEADS}, BF16),
    Case("dp=2,fsdp=2,zero=1", GPT2, {"reduce": "bf16"}),
    Case("dp=2,fsdp=2,zero=2,micro=1", QWEN2),
    Case("dp=2,fsdp=2,micro=1", QWEN3, BF16),
    Case("dp=2,tp=2", GPT2),
    Case("dp=2,pp=2,schedule=interleaved", TIED, {"reduce": "bf16"}),
    Case("fsdp=2,zero=1,pp=2", TIED),
    Case("fsdp=2,zero=2,pp=2,schedule=zbv", TIED),
    Case("fsdp=2,pp=2,schedule=zb,micro=1,recompute=selective", TIED, BF16),
    Case("fsdp=2,pp=2,unit=2", GPT2, tune={"persist_below": 500}),
    Case("tp=2,pp=2", {**TIED, **SHARED_HEADS}),
    Case("tp=2,pp=2,schedule=dualpipev,sp=0", GPT2, BF16),
    Case("tp=2,pp=2,schedule=interleaved,recompute=full", QWEN3, DROPOUT),
    Case("cp=4", TIED),
    Case("cp=4,cp_kind=ulysses", SHARED_HEADS),
    Case("dp=2,cp=2,micro=2", QWEN2),
    Case("fsdp=2,zero=1,cp=2", {"vocab": 3}),
    Case("fsdp=2,cp=2,cp_kind=ulysses,micro=2", {}, BF16),
    Case("tp=2,cp=2", QWEN2),
    Case("tp=2,sp=0,cp=2,cp_kind=ulysses", SHARED_HEADS),
    Case("cp=2,pp=2,schedule=zb", TIED),
    Case("tp=2,cp=2", TWO, compiled=True),
]


# As many cases as share their processes: any worker of the test suite can run any of the groups. Compiled ones take
# ten times as long.
TOGETHER = {False: 7, True: 3}


def groups(cases: list[Case]) -> list[list[Case]]:
    """Those that are compiled by themselves: they share what the compiler has to import."""
    found = []
    for compiled, together in TOGETHER.items():
        kind = [case for case in cases if case.compiled == compiled]
        found += [kind[first : first + together] for first in range(0, len(kind), together)]
    return found


@pytest.mark.parametrize(
    "cases", thinned(groups(WORLD_2), 3, one=True), ids=lambda cases: f"{cases[0]} and {len(cases) - 1} more"
)
def test_two_ranks_send_what_was_announced(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_announced(2, cases, monkeypatch)


@pytest.mark.parametrize(
    "cases", thinned(groups(WORLD_4), 2, one=True), ids=lambda cases: f"{cases[0]} and {len(cases) - 1} more"
)
def test_four_ranks_send_what_was_announced(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_announced(4, cases, monkeypatch)


def assert_announced(world: int, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, counted in enumerate(run_ranks(world, count, cases)):
        for case, sent in zip(cases, counted, strict=True):
            monkeypatch.setattr(logits, "LOGITS_AT_ONCE", case.logits_at_once)
            assert traffic(case.workload, rank) == sent, f"{case}, rank {rank}"
