"""What other stacks run of a layout, and the nearest that they do."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.facts.cluster.stack import STACKS
from shoal.facts.layout import Layout
from shoal.facts.layout.stack_limits import RULES, Asked, gaps, nearest, runs
from shoal.facts.model import presets
from shoal.facts.recipe import Recipe


def asked(layout: str, model: str = "llama3-8b", lora: int | None = None, **recipe: Any) -> Asked:
    values = {"seq": 4096, "batch": 64, "precision": "bf16", **recipe}
    return Asked(Layout.parse(layout), presets.find(model), Recipe(**values), lora)


@pytest.mark.parametrize(
    ("stack", "layout", "becomes"),
    [
        # Megatron shards gradients and weights without a pipeline only, and knows no disks.
        ("megatron", "fsdp=8", "fsdp=8"),
        ("megatron", "fsdp=4,pp=2,micro=1", "fsdp=4,zero=1,pp=2,micro=1"),
        ("megatron", "fsdp=8,offload=optimizer@nvme+params@nvme", "fsdp=8,offload=optimizer"),
        ("megatron", "fsdp=8,recompute=full,offload=activations", "fsdp=8,recompute=full"),
        ("megatron", "dp=2,pp=4,schedule=zbv,micro=4", "dp=2,pp=4,schedule=interleaved,micro=4"),
        ("megatron", "dp=2,pp=4,schedule=zb,micro=4", "dp=2,pp=4,micro=4"),
        ("megatron", "fsdp=8,unit=4", "fsdp=8"),
        # torchtitan's shards are of everything, and offload is of all or nothing.
        ("torchtitan", "fsdp=8,zero=1", "fsdp=8,zero=2"),
        ("torchtitan", "fsdp=8,offload=optimizer:0.5", "fsdp=8,offload=optimizer+params"),
        ("torchtitan", "fsdp=4,cp=2,cp_kind=ulysses", "fsdp=4,cp=2"),
        ("torchtitan", "fsdp=2,pp=4,micro=16", "fsdp=2,pp=4,micro=8"),
        # DeepSpeed's AutoTP goes with stages up to 2, its pipeline with 0 and 1.
        ("deepspeed", "fsdp=8,tp=2", "fsdp=8,zero=2,tp=2,sp=0"),
        ("deepspeed", "fsdp=4,pp=2,micro=1", "fsdp=4,zero=1,pp=2,micro=1"),
        ("deepspeed", "dp=2,fsdp=4", "fsdp=8"),
        ("deepspeed", "dp=8,offload=optimizer", "fsdp=8,zero=1,offload=optimizer"),
        ("deepspeed", "fsdp=8,zero=2,offload=optimizer:0.5@nvme", "fsdp=8,zero=2,offload=optimizer"),
        ("deepspeed", "fsdp=8,offload=optimizer:0.5@nvme", "fsdp=8,offload=optimizer:0.5@nvme"),
        ("deepspeed", "fsdp=8,recompute=selective", "fsdp=8,recompute=full"),
        ("deepspeed", "fsdp=2,cp=4", "fsdp=2,cp=4,cp_kind=ulysses"),
        ("shoal", "fsdp=8,unit=4,offload=optimizer@nvme", "fsdp=8,unit=4,offload=optimizer@nvme"),
    ],
)
def test_nearest(stack: str, layout: str, becomes: str) -> None:
    found, notes = nearest(stack, asked(layout))
    assert found == Layout.parse(becomes)
    assert bool(notes) == (Layout.parse(layout) != Layout.parse(becomes))
    assert all("; nearest: " in note for note in notes)
    # What is nearest is run.
    assert runs(stack, asked(becomes))


def test_interleaving_takes_whole_rounds_of_micro_batches() -> None:
    three = asked("dp=2,pp=4,schedule=interleaved,micro=1", batch=12)
    assert nearest("megatron", three)[0] == Layout.parse("dp=2,pp=4,micro=1")
    assert runs("megatron", asked("dp=2,pp=4,schedule=interleaved,micro=1", batch=16))


def test_too_few_sequences_for_a_pipeline_are_no_layouts_fault() -> None:
    (gap,) = gaps("torchtitan", asked("dp=2,pp=4,micro=1", batch=4))
    assert gap.changes is None and "fewer than stages" in gap.what


def test_a_pipeline_of_deepspeed_goes_with_no_other_split() -> None:
    (gap,) = gaps("deepspeed", asked("dp=2,tp=2,sp=0,pp=2,micro=1"))
    assert gap.changes is None and "PipelineModule" in gap.what


def test_experts_and_adapters() -> None:
    assert nearest("megatron", asked("fsdp=4,tp=2,sp=0", "mixtral-8x7b"))[0].sp
    assert runs("megatron", asked("fsdp=4,tp=2,sp=0"))
    assert not runs("torchtitan", asked("fsdp=8", lora=16))


def test_every_stack_but_ours_has_rules() -> None:
    assert RULES.keys() == STACKS.keys() - {"shoal"}
