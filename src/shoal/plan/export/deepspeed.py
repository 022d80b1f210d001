"""Export to DeepSpeed: one JSON file, with the fields of 0.19, which has AutoTP and AutoEP and no longer MiCS.

``benchmarks/exports.py`` loads the files with DeepSpeed's own parser, most recently 0.19.8.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.facts.cluster.stack import DEEPSPEED
from shoal.plan.export.shared import (
    Exported,
    bucket_elements,
    machines,
    offloads,
    settled,
    sharding,
    unit_elements,
)
from shoal.predict.workload import Workload

FILE = "ds_config.json"
CHECKED = "DeepSpeed 0.19.8"
_NVME_PATH = "/local_nvme"
# DeepSpeed's own AdamW decays every parameter in one group.
_DECAY = (
    "weight decay on matrices only: DeepSpeed's optimizer decays norms and biases too; "
    "nearest: pass parameter groups to deepspeed.initialize"
)


def write(workload: Workload) -> Exported:
    runs_as, notes = settled(DEEPSPEED, workload)
    # Ranks of a replica that together keep a second copy of its weights.
    copy = workload.layout.shards if workload.layout.dp > 1 else None
    workload = replace(workload, layout=runs_as.layout)
    nodes, per_node = machines(workload)
    hosts = f"--hostfile hostfile --num_nodes {nodes} " if nodes > 1 else ""
    command = f"deepspeed {hosts}--num_gpus {per_node} train.py --deepspeed --deepspeed_config {FILE}"
    text = json.dumps(settings(workload, copy), indent=2) + "\n"
    return Exported({FILE: text}, command, [*notes, *cannot(workload)], runs_as, CHECKED)


def settings(workload: Workload, copy: int | None = None) -> dict[str, Any]:
    """The whole file, as a dictionary. ``copy``: ranks that share a second copy of the weights."""
    recipe, layout = workload.recipe, workload.layout
    given: dict[str, Any] = {
        "train_batch_size": recipe.batch,
        "train_micro_batch_size_per_gpu": workload.micro,
        "gradient_accumulation_steps": workload.accumulation,
        "gradient_clipping": recipe.clip,
        **_precision(workload),
        "optimizer": _optimizer(workload),
        **_scheduler(workload),
        "zero_optimization": _zero(workload, copy),
        **_recompute(workload),
    }
    if recipe.optimizer == "sgd" and stage(workload):
        given["zero_allow_untested_optimizer"] = True
    if layout.tp > 1:
        given["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.cp > 1:
        given["sequence_parallel_size"] = layout.cp
    if layout.ep > 1:
        given["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
    return given


def stage(workload: Workload) -> int:
    """The ZeRO stage. Offload needs at least stage 1, even on a single rank."""
    return max(sharding(workload), int("optimizer" in offloads(workload)))


def _precision(workload: Workload) -> dict[str, Any]:
    recipe = workload.recipe
    given: dict[str, Any] = {}
    if recipe.precision in ("bf16", "fp8"):
        given["bf16"] = {"enabled": True}
        if recipe.states == "bf16" and stage(workload):
            given["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if recipe.precision == "fp16":
        # As Shoal scales the loss: halved at every overflow, doubled after 2000 steps without one.
        given["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
        }
    return given | {"communication_data_type": recipe.reduce}


def _optimizer(workload: Workload) -> dict[str, Any]:
    recipe = workload.recipe
    common = {"lr": recipe.peak_lr, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "sgd":
        return {"type": "SGD", "params": {**common, "momentum": recipe.momentum}}
    return {
        "type": "AdamW",
        "params": {**common, "betas": [recipe.beta1, recipe.beta2], "eps": recipe.eps},
    }


def _scheduler(workload: Workload) -> dict[str, Any]:
    recipe = workload.recipe
    warmup = recipe.warmup_steps
    held = recipe.schedule in ("constant", "wsd")
    if held and not warmup:
        return {}  # the optimizer's own rate
    # Zero warm-up steps cannot be expressed, but a warm-up that starts at the peak can.
    steps = {"warmup_num_steps": warmup or 1, "warmup_type": "linear"}
    rates = {"warmup_min_lr": 0.0 if warmup else recipe.peak_lr, "warmup_max_lr": recipe.peak_lr}
    if held:
        return {"scheduler": {"type": "WarmupLR", "params": {**rates, **steps}}}
    steps["total_num_steps"] = recipe.steps
    if recipe.schedule == "linear":
        return {"scheduler": {"type": "WarmupDecayLR", "params": {**rates, **steps}}}
    ratios = {"warmup_min_ratio": 0.0 if warmup else 1.0, "cos_min_ratio": recipe.lr_min}
    return {"scheduler": {"type": "WarmupCosineLR", "params": {**ratios, **steps}}}


def _zero(workload: Workload, copy: int | None) -> dict[str, Any]:
    tune = workload.tune
    elements = bucket_elements(workload)
    zero: dict[str, Any] = {
        "stage": stage(workload),
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
    }
    if zero["stage"] == 3:
        unit = unit_elements(workload)
        zero["stage3_prefetch_bucket_size"] = tune.prefetch * unit
        # The default would hold back prefetching of blocks this large.
        zero["stage3_max_live_parameters"] = max(10**9, (1 + tune.prefetch) * unit)
        zero["stage3_param_persistence_threshold"] = tune.persist_below
        if copy is not None:
            zero["zero_hpz_partition_size"] = copy
    return zero | _offload(workload)


def _offload(workload: Workload) -> dict[str, Any]:
    waiting, given = offloads(workload), {}
    if "optimizer" in waiting and stage(workload):
        part = waiting["optimizer"]
        given["offload_optimizer"] = _place(part.nvme)
        if part.fraction < 1:
            given["offload_optimizer"]["ratio"] = part.fraction
    if "params" in waiting and stage(workload) == 3:
        given["offload_param"] = _place(waiting["params"].nvme)
    return given


def _place(nvme: bool) -> dict[str, Any]:
    place: dict[str, Any] = {"device": "nvme" if nvme else "cpu", "pin_memory": True}
    return place | ({"nvme_path": _NVME_PATH} if nvme else {})


def _recompute(workload: Workload) -> dict[str, Any]:
    if workload.layout.recompute != "full":
        return {}
    return {
        "activation_checkpointing": {
            "partition_activations": workload.layout.tp > 1,
            "cpu_checkpointing": "activations" in offloads(workload),
        }
    }


def cannot(workload: Workload) -> Iterator[str]:
    """Settings that this file cannot express."""
    yield from _cannot_place(workload)
    yield from _cannot_keep(workload)
    yield from _cannot_compute(workload)


def _cannot_place(workload: Workload) -> Iterator[str]:
    layout, zero = workload.layout, stage(workload)
    if layout.pp > 1:
        yield (
            f"pp={layout.pp}: a pipeline is code, not configuration; nearest: the model as "
            f"deepspeed.pipe.PipelineModule(num_stages={layout.pp}), whose engine takes ZeRO 0 and 1"
        )
    if layout.cp > 1:
        yield (
            f"cp={layout.cp}: sequence_parallel_size alone changes no model; nearest: "
            "UlyssesSPAttentionHF.register_with_transformers in train.py"
        )
    if workload.tune.persist_below and zero == 3:
        yield "persist_below counts a group's elements; nearest: the threshold, which counts each parameter's"


def _cannot_keep(workload: Workload) -> Iterator[str]:
    if workload.layout.recompute == "full":
        yield "recompute=full: it is the model that recomputes; nearest: also gradient_checkpointing_enable()"


def _cannot_compute(workload: Workload) -> Iterator[str]:
    """Recipe settings that it cannot express."""
    recipe = workload.recipe
    yield (
        f"{workload.model.name}, seq={recipe.seq}, steps={recipe.steps}, seed={recipe.seed}: this file holds none of "
        "them; nearest: arguments of train.py"
    )
    if recipe.weight_decay:
        yield _DECAY
    if recipe.schedule == "wsd":
        yield "schedule=wsd: nearest: WarmupLR, the same without the decay at the end"
    if recipe.schedule == "linear" and recipe.lr_min:
        yield f"lr_min={recipe.lr_min}: WarmupDecayLR ends at 0; nearest: that"
    if recipe.precision == "fp64":
        yield "precision=fp64: nearest: fp32"
    if recipe.precision == "fp8":
        yield "precision=fp8: it belongs to the model's layers (Transformer Engine); nearest: bf16"
    if recipe.states == "int8" or (
        recipe.states == "bf16" and not (stage(workload) and recipe.precision == "bf16")
    ):
        yield f"states={recipe.states}: nearest: fp32 master weights and moments"
    if recipe.dropout:
        yield f"dropout={recipe.dropout}: it belongs to the model's config.json; nearest: set it there"
    if recipe.z_loss:
        yield f"z_loss={recipe.z_loss}: the script computes the loss; nearest: 0"
    if workload.lora is not None:
        yield f"lora of rank {workload.lora.rank}: nearest: peft.get_peft_model before deepspeed.initialize"
