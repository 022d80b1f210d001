"""Export to Megatron-Bridge: a Python script around its ``ConfigContainer``, with the fields of 0.3 on Megatron Core
0.16.

It trains on the same core as Megatron-LM and NeMo 2, which it succeeds for language models.
"""

from __future__ import annotations

from typing import Any

from shoal.plan.export import megatron, nemo
from shoal.plan.export.shared import Code, Exported, call, machines, torchrun
from shoal.predict.workload import Workload

FILE = "bridge_run.py"
CHECKED = "the fields of Megatron-Bridge 0.3.1 with Megatron Core 0.16.1"


def write(workload: Workload) -> Exported:
    workload, cannot, runs_as = megatron.settled_here(workload)
    cannot += megatron.cannot(workload)
    return Exported({FILE: _script(workload)}, f"{torchrun(workload)} {FILE}", cannot, runs_as, CHECKED)


def _script(workload: Workload) -> str:
    recipe, (nodes, devices) = workload.recipe, machines(workload)
    provider = "MLAModelProvider" if workload.model.latent is not None else "GPTModelProvider"
    place = "mla_provider" if workload.model.latent is not None else "gpt_provider"
    batches = {
        "micro_batch_size": workload.micro,
        "global_batch_size": recipe.batch,
        "train_iters": recipe.steps,
    }
    overlap = {"tp_comm_overlap": megatron.sequence_parallel(workload)}
    parts = {
        "model": _nested(provider, _model(workload)),
        "train": _nested("TrainingConfig", batches),
        "optimizer": _nested("OptimizerConfig", _optimizer(workload)),
        "ddp": _nested("DistributedDataParallelConfig", _data_ranks(workload)),
        "scheduler": _nested("SchedulerConfig", _schedule(workload)),
        # To replace with your own: GPTDatasetConfig(blend=…).
        "dataset": _nested(
            "MockGPTDatasetConfig",
            {
                "seq_length": recipe.seq,
                "random_seed": seed(workload),
                "reset_position_ids": False,
                "reset_attention_mask": False,
                "eod_mask_loss": False,
            },
        ),
        # Its null tokenizer adds an end-of-document token to the given vocabulary.
        "tokenizer": _nested(
            "TokenizerConfig", {"tokenizer_type": "NullTokenizer", "vocab_size": workload.model.vocab - 1}
        ),
        "rng": _nested("RNGConfig", {"seed": seed(workload)}),
        "comm_overlap": _nested("CommOverlapConfig", overlap),
        "mixed_precision": _nested("MixedPrecisionConfig", _precision(workload)),
        "logger": Code("LoggerConfig()"),
        "checkpoint": Code("CheckpointConfig()"),
    }
    return f'''"""Megatron-Bridge: {workload.model.name} in {workload.layout}."""

import os

import torch
from megatron.bridge.models.{place} import {provider}
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.pretrain import pretrain

num_nodes = {nodes}
devices = {devices}

config = {call("ConfigContainer", parts)}

if __name__ == "__main__":
    assert int(os.environ["WORLD_SIZE"]) == num_nodes * devices
    pretrain(config, forward_step)
'''


def _nested(name: str, given: dict[str, Any]) -> Code:
    return Code(call(name, given, depth=1))


def seed(workload: Workload) -> int:
    """Megatron rejects seed 0."""
    return max(1, workload.recipe.seed)


def _model(workload: Workload) -> dict[str, Any]:
    layout, model = workload.layout, workload.model
    given = nemo.shape_of(workload)
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "llama3" and model.latent is None:
        for name in ("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len"):
            del given[name]
        given |= {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
    if model.latent is not None:
        given["multi_latent_attention"] = True
        if scaling is not None and scaling.kind == "yarn":
            given |= {
                "rotary_scaling_factor": scaling.factor,
                "mscale": scaling.mscale or 1.0,
                "mscale_all_dim": scaling.mscale_all_dim or 0.0,
            }
    given |= {
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "native",
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": megatron.sequence_parallel(workload),
        "context_parallel_size": layout.cp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
    }
    if model.experts is not None:
        given["expert_tensor_parallel_size"] = 1
    if layout.pp > 1:
        given["pipeline_dtype"] = Code(f"torch.{nemo.dtype_of(workload)}")
        stages = megatron.stage_layout(workload)
        if stages is not None:
            given["pipeline_model_parallel_layout"] = stages
        elif layout.chunks > 1:
            given["virtual_pipeline_model_parallel_size"] = layout.chunks
    return given


def _data_ranks(workload: Workload) -> dict[str, Any]:
    given = nemo.data_ranks(workload)
    return given | ({"use_megatron_fsdp": True} if megatron.uses_fsdp(workload) else {})


def _optimizer(workload: Workload) -> dict[str, Any]:
    recipe = workload.recipe
    least = Code(f"{recipe.peak_lr * recipe.lr_min:.6g}")
    return nemo.optimizer_of(workload) | {"min_lr": least}


def _precision(workload: Workload) -> dict[str, Any]:
    precision = workload.recipe.precision
    given: dict[str, Any] = {
        "bf16": precision in ("bf16", "fp8"),
        "fp16": precision == "fp16",
        "fp32": precision in ("fp32", "fp64"),
        "params_dtype": Code(f"torch.{nemo.dtype_of(workload)}"),
        "pipeline_dtype": Code(f"torch.{nemo.dtype_of(workload)}"),
        "grad_reduce_in_fp32": workload.recipe.reduce == "fp32",
    }
    return given | ({"fp8": "hybrid"} if precision == "fp8" else {})


def _schedule(workload: Workload) -> dict[str, Any]:
    recipe = workload.recipe
    given: dict[str, Any] = {
        "lr_decay_style": "WSD" if recipe.schedule == "wsd" else recipe.schedule,
        "lr_warmup_iters": recipe.warmup_steps,
        "lr_decay_iters": recipe.steps,
    }
    if recipe.schedule == "wsd":
        given |= {"lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": recipe.decay_steps}
    return given
