"""DeepSpeed's JSON: what each part of a layout and a recipe becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.plan.exporting import ask, questions

from shoal.facts.config import TuneSection
from shoal.plan.export import export

# Every key that DeepSpeed 0.19's DeepSpeedConfig reads and we write; benchmarks/exports.py loads files with it.
KNOWN = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16 fp16 "
    "communication_data_type optimizer scheduler zero_optimization activation_checkpointing tensor_parallel "
    "sequence_parallel_size expert_parallel zero_allow_untested_optimizer",
    "zero_optimization": "stage overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size "
    "allgather_bucket_size stage3_prefetch_bucket_size stage3_max_live_parameters "
    "stage3_param_persistence_threshold zero_hpz_partition_size offload_optimizer offload_param",
    "bf16": "enabled bf16_master_weights_and_grads bf16_optimizer_states",
    "fp16": "enabled loss_scale initial_scale_power loss_scale_window hysteresis",
    "activation_checkpointing": "partition_activations cpu_checkpointing",
}


def settings(layout: str, **others: Any) -> dict[str, Any]:
    exported = export("deepspeed", ask(layout, **others))
    loaded: dict[str, Any] = json.loads(exported.files["ds_config.json"])
    return loaded


def gaps(layout: str, **others: Any) -> str:
    return "\n".join(export("deepspeed", ask(layout, **others)).cannot)


def test_only_keys_that_deepspeed_reads() -> None:
    for workload in questions():
        given = json.loads(export("deepspeed", workload).files["ds_config.json"])
        for section, keys in KNOWN.items():
            inside = given.get(section, {}) if section else given
            assert inside.keys() <= set(keys.split())


def test_batches_multiply() -> None:
    for workload in questions():
        given = json.loads(export("deepspeed", workload).files["ds_config.json"])
        each = given["train_micro_batch_size_per_gpu"] * given["gradient_accumulation_steps"]
        assert given["train_batch_size"] == each * workload.layout.data_ranks


@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        ("dp=8", 0),
        ("fsdp=8,zero=1", 1),
        ("fsdp=8,zero=2", 2),
        ("fsdp=8", 3),
        ("fsdp=2,pp=4,micro=1", 1),
        ("cp=8", 3),
    ],
)
def test_stage(layout: str, stage: int) -> None:
    assert settings(layout)["zero_optimization"]["stage"] == stage


def test_tuned_sizes_are_in_elements() -> None:
    tune = TuneSection(bucket_mb=50.0, prefetch=2, persist_below=1000)
    zero = settings("fsdp=8", model="llama3-8b", tune=tune)["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 50 * 2**20 // 4
    block = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
    assert zero["stage3_prefetch_bucket_size"] == 2 * block
    assert zero["stage3_param_persistence_threshold"] == 1000
    assert (
        settings("fsdp=8", reduce="bf16", tune=tune)["zero_optimization"]["reduce_bucket_size"]
        == 50 * 2**20 // 2
    )


def test_offload() -> None:
    zero = settings("fsdp=8,offload=optimizer:0.5@nvme+params")["zero_optimization"]
    assert zero["offload_optimizer"] == {
        "device": "nvme",
        "pin_memory": True,
        "nvme_path": "/local_nvme",
        "ratio": 0.5,
    }
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    # DeepSpeed refuses a ratio below stage 3, and offloads nothing at stage 0.
    below = settings("fsdp=8,zero=2,offload=optimizer:0.5")["zero_optimization"]
    assert below["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "nearest: all of it" in gaps("fsdp=8,zero=2,offload=optimizer:0.5")
    assert settings("dp=8,offload=optimizer")["zero_optimization"]["stage"] == 1
    assert "nearest: zero=1" in gaps("dp=8,offload=optimizer")
    # ZeRO-Offload on one device is a stage of one rank.
    alone = settings("dp=1,offload=optimizer,micro=1")["zero_optimization"]
    assert alone["stage"] == 1 and alone["offload_optimizer"]["device"] == "cpu"
    kept = settings("fsdp=8,recompute=full,offload=activations")["activation_checkpointing"]
    assert kept["cpu_checkpointing"] is True


@pytest.mark.parametrize(
    ("recipe", "kind", "some"),
    [
        ({"schedule": "constant"}, "WarmupLR", {"warmup_num_steps": 15, "warmup_max_lr": 3e-4}),
        ({"schedule": "linear"}, "WarmupDecayLR", {"total_num_steps": 300, "warmup_type": "linear"}),
        (
            {"schedule": "cosine", "lr_min": 0.1},
            "WarmupCosineLR",
            {"cos_min_ratio": 0.1, "warmup_min_ratio": 0.0},
        ),
        ({"schedule": "cosine", "warmup": 0}, "WarmupCosineLR", {"warmup_min_ratio": 1.0}),
    ],
)
def test_scheduler(recipe: dict[str, Any], kind: str, some: dict[str, Any]) -> None:
    scheduler = settings("dp=8", **recipe)["scheduler"]
    assert scheduler["type"] == kind
    assert some.items() <= scheduler["params"].items()


def test_a_constant_rate_without_warmup_needs_no_scheduler() -> None:
    assert "scheduler" not in settings("dp=8", schedule="constant", warmup=0)


def test_other_axes() -> None:
    given = settings("dp=2,fsdp=2,cp=2,cp_kind=ulysses", batch=64)
    assert given["sequence_parallel_size"] == 2
    assert given["zero_optimization"]["zero_hpz_partition_size"] == 4
    split = settings("fsdp=8,tp=2", batch=64)
    assert split["tensor_parallel"] == {"autotp_size": 2}
    assert split["zero_optimization"]["stage"] == 2 and "AutoTP refuses stage 3" in gaps("fsdp=8,tp=2")
    assert settings("fsdp=8,ep=4", model="mixtral-8x7b")["expert_parallel"]["autoep_size"] == 4
    said = gaps("fsdp=2,tp=2,pp=2,schedule=interleaved,micro=1")
    for what in ("PipelineModule(num_stages=2)", "nearest: 1f1b", "nearest: stage 1", "nearest: sp=0"):
        assert what in said
    assert "nearest: ulysses" in gaps("fsdp=2,cp=2")


def test_precision() -> None:
    assert settings("fsdp=8", states="bf16")["bf16"]["bf16_optimizer_states"] is True
    assert settings("fsdp=8", precision="fp16")["fp16"]["loss_scale"] == 0
    assert not {"bf16", "fp16"} & settings("fsdp=8", precision="fp32").keys()
    assert settings("fsdp=8", reduce="bf16")["communication_data_type"] == "bf16"
    assert "nearest: bf16" in gaps("fsdp=8", precision="fp8")
