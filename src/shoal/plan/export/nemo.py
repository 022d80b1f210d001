"""Export to NeMo 2: a Python script around its MegatronStrategy, as of 2.4 (NeMo 3 dropped language models)."""

from __future__ import annotations

from typing import Any

from shoal.plan.export import megatron, megatron_model
from shoal.plan.export.shared import (
    Code,
    Exported,
    bucket_elements,
    call,
    machines,
    offloads,
    sharding,
    torchrun,
)
from shoal.predict.workload import Workload

FILE = "nemo_run.py"
CHECKED = "NeMo 2.4, the last that trains language models; later ones: --export megatron-bridge"


def write(workload: Workload) -> Exported:
    workload, cannot, runs_as = megatron.settled_here(workload)
    command = f"{torchrun(workload)} {FILE}"
    cannot += megatron.cannot(workload)
    if workload.recipe.schedule == "wsd":
        cannot.append("schedule=wsd: nearest: WarmupPolicyScheduler, the same without the decay at the end")
    return Exported({FILE: _script(workload)}, command, cannot, runs_as, CHECKED)


def _script(workload: Workload) -> str:
    model, shape = _classes(workload)
    scheduler, schedule = _schedule(workload)
    calls = {
        "strategy": call("nl.MegatronStrategy", _strategy(workload)),
        "trainer": call("nl.Trainer", _trainer(workload)),
        "config": call(f"llm.{shape}", shape_of(workload)),
        "data": call(
            "llm.MockDataModule",  # to replace with your own: llm.PreTrainingDataModule(paths=…)
            {
                "seq_length": workload.recipe.seq,
                "micro_batch_size": workload.micro,
                "global_batch_size": workload.recipe.batch,
            },
        ),
        "optimizer": call(
            "MegatronOptimizerModule",
            {
                "config": Code(call("OptimizerConfig", optimizer_of(workload), depth=1)),
                "lr_scheduler": Code(call(scheduler, schedule, depth=1)),
            },
        ),
    }
    body = "\n".join(f"{name} = {made}" for name, made in calls.items())
    return f'''"""NeMo 2: {workload.model.name} in {workload.layout}."""

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.lightning.pytorch.optim import MegatronOptimizerModule, {scheduler}

{body}

if __name__ == "__main__":
    llm.pretrain(model=llm.{model}(config), data=data, trainer=trainer, optim=optimizer)
'''


def _strategy(workload: Workload) -> dict[str, Any]:
    layout = workload.layout
    given: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": megatron.sequence_parallel(workload),
        "context_parallel_size": layout.cp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "ddp": Code(call("DistributedDataParallelConfig", data_ranks(workload), depth=1)),
    }
    if workload.model.experts is not None:
        given["expert_tensor_parallel_size"] = 1
    if layout.pp > 1:
        given["pipeline_dtype"] = Code(f"torch.{dtype_of(workload)}")
        stages = megatron.stage_layout(workload)
        if stages is not None:
            given["pipeline_model_parallel_layout"] = stages
        elif layout.chunks > 1:
            given["virtual_pipeline_model_parallel_size"] = layout.chunks
    if megatron.uses_fsdp(workload):
        given["fsdp"] = "megatron"
    if layout.dp > 1 and sharding(workload):
        given["num_distributed_optimizer_instances"] = layout.dp
    return given


def data_ranks(workload: Workload) -> dict[str, Any]:
    layout, zero = workload.layout, sharding(workload)
    given: dict[str, Any] = {
        "grad_reduce_in_fp32": workload.recipe.reduce == "fp32",
        "overlap_grad_reduce": layout.data_ranks * layout.cp > 1,
        "overlap_param_gather": zero > 0,
        "use_distributed_optimizer": zero > 0,
    }
    if megatron.own_buckets(workload):
        given["bucket_size"] = bucket_elements(workload)
    if layout.dp > 1 and zero:
        given["num_distributed_optimizer_instances"] = layout.dp
    if megatron.uses_fsdp(workload):
        given["data_parallel_sharding_strategy"] = megatron.STRATEGIES[zero]
    return given


def _trainer(workload: Workload) -> dict[str, Any]:
    nodes, per_node = machines(workload)
    precision = {"bf16": "bf16-mixed", "fp8": "bf16-mixed", "fp16": "16-mixed"}.get(
        workload.recipe.precision, "32"
    )
    plugin: dict[str, Any] = {"precision": precision, "grad_reduce_in_fp32": workload.recipe.reduce == "fp32"}
    if workload.recipe.precision == "fp8":
        plugin["fp8"] = "hybrid"
    return {
        "devices": per_node,
        "num_nodes": nodes,
        "max_steps": workload.recipe.steps,
        "accelerator": "gpu",
        "strategy": Code("strategy"),
        "plugins": Code(call("nl.MegatronMixedPrecision", plugin, depth=1)),
        "use_distributed_sampler": False,
    }


def _classes(workload: Workload) -> tuple[str, str]:
    """The model and config classes: the plain ones, unless positions or attention need those of a family."""
    model = workload.model
    if model.latent is not None:
        return "DeepSeekModel", "DeepSeekV3Config"
    if model.rope_scaling is not None and model.rope_scaling.kind == "llama3":
        return "LlamaModel", "Llama31Config"
    return "GPTModel", "GPTConfig"


def shape_of(workload: Workload) -> dict[str, Any]:
    model, recipe, layout = workload.model, workload.recipe, workload.layout
    activation = "silu" if model.gated else "gelu"
    given: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "seq_length": recipe.seq,
        "vocab_size": model.vocab,
        "make_vocab_size_divisible_by": 1,
        "share_embeddings_and_output_weights": model.tied,
        "position_embedding_type": "rope" if model.positions == "rotary" else "learned_absolute",
        "rotary_base": int(model.rope_theta),
        "rotary_percent": model.rope_fraction,
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "layernorm_epsilon": model.norm_eps,
        "gated_linear_unit": model.gated,
        "activation_func": Code(f"torch.nn.functional.{activation}"),
        "add_bias_linear": model.out_bias or model.mlp_bias,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "init_method_std": model.init_std,
        "hidden_dropout": recipe.dropout,
        "attention_dropout": recipe.dropout,
        "calculate_per_token_loss": True,
    }
    if model.activation == "gelu_tanh":
        given["bias_activation_fusion"] = True  # the fused one is the tanh approximation
    if model.window is not None:
        given["window_size"] = (model.window - 1, 0)
        if model.window_layers is not None:
            given["window_attn_skip_freq"] = [
                int(layer in model.window_layers) for layer in range(model.layers)
            ]
    if layout.cp > 1:
        given["cp_comm_type"] = "p2p" if layout.cp_kind == "ring" else "a2a"
    return given | _special(workload) | _experts(workload) | _kept(workload)


def _special(workload: Workload) -> dict[str, Any]:
    """Fields that only a family's own config has."""
    latent, scaling = workload.model.latent, workload.model.rope_scaling
    if latent is not None:
        return {
            "q_lora_rank": latent.q_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.nope_dim,
            "qk_pos_emb_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
        }
    if scaling is not None and scaling.kind == "llama3":
        return {
            "scale_factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "old_context_len": scaling.original_positions,
        }
    return {}


def _experts(workload: Workload) -> dict[str, Any]:
    model, experts = workload.model, workload.model.experts
    if experts is None:
        return {}
    given: dict[str, Any] = {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.active,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_grouped_gemm": workload.recipe.precision == "bf16",
        "moe_token_dispatcher_type": "alltoall",
        **{f"moe_{name}": value for name, value in megatron_model.balance(workload).items()},
        "moe_router_score_function": experts.score,
        "moe_layer_freq": [int(layer not in experts.dense_layers) for layer in range(model.layers)],
    }
    if experts.shared_ffn:
        given["moe_shared_expert_intermediate_size"] = experts.shared_ffn
    if experts.groups > 1:
        given |= {"moe_router_num_groups": experts.groups, "moe_router_group_topk": experts.active_groups}
    if experts.scale != 1:
        given["moe_router_topk_scaling_factor"] = experts.scale
    if experts.router_bias:
        given["moe_router_enable_expert_bias"] = True
    return given


def _kept(workload: Workload) -> dict[str, Any]:
    """Activation recomputation and offload, which are model settings here."""
    layout = workload.layout
    if layout.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if layout.recompute == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": megatron.recomputed_modules(workload),
        }
    if "activations" in offloads(workload) and layout.pp == 1:
        layers = megatron.offloaded_layers(workload)
        return {"cpu_offloading": True, "cpu_offloading_num_layers": layers}
    return {}


def optimizer_of(workload: Workload) -> dict[str, Any]:
    recipe, waiting = workload.recipe, offloads(workload)
    given: dict[str, Any] = {
        "optimizer": "adam" if recipe.optimizer == "adamw" else "sgd",
        "lr": recipe.peak_lr,
        "weight_decay": recipe.weight_decay,
        "clip_grad": recipe.clip,
        "bf16": recipe.precision in ("bf16", "fp8"),
        "fp16": recipe.precision == "fp16",
        "use_distributed_optimizer": sharding(workload) > 0,
    }
    if recipe.optimizer == "adamw":
        given |= {"adam_beta1": recipe.beta1, "adam_beta2": recipe.beta2, "adam_eps": recipe.eps}
    else:
        given["sgd_momentum"] = recipe.momentum
    if "optimizer" in waiting:
        given |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": waiting["optimizer"].fraction}
        given["use_precision_aware_optimizer"] = True
    return given


def _schedule(workload: Workload) -> tuple[str, dict[str, Any]]:
    recipe = workload.recipe
    given: dict[str, Any] = {"warmup_steps": recipe.warmup_steps, "max_steps": recipe.steps}
    if recipe.schedule in ("constant", "wsd"):
        return "WarmupPolicyScheduler", given
    given["min_lr"] = Code(f"{recipe.peak_lr * recipe.lr_min:.6g}")
    if recipe.schedule == "linear":
        return "WarmupAnnealingScheduler", given
    return "CosineAnnealingScheduler", given | {"constant_steps": 0}


def dtype_of(workload: Workload) -> str:
    return {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16"}.get(
        workload.recipe.precision, "float32"
    )
