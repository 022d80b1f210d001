"""Write a Model as a ``config.json`` that ``transformers`` reads back as the same shape."""

from __future__ import annotations

from typing import Any

from shoal.facts.model import Model
from shoal.facts.model.huggingface.dialects import (
    ACTIVATIONS,
    DIALECTS,
    EXPERT_COUNT,
    GEMMA,
    GPT,
    OPTIONAL_BIAS,
)
from shoal.facts.model.huggingface.read import read_config
from shoal.facts.model.huggingface.rope import LOCAL_THETA, write_rope
from shoal.facts.problem import BadInput


def write_config(model: Model) -> dict[str, Any]:
    """The ``config.json`` that ``transformers`` reads back as this shape."""
    dialect = DIALECTS[model.family]
    config = {
        "architectures": [dialect.architecture],
        "model_type": model.family,
        dialect.layers[0]: model.layers,
        dialect.hidden[0]: model.hidden,
        dialect.heads[0]: model.heads,
        "n_inner" if model.family == "gpt2" else "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
        dialect.positions[0]: model.max_positions,
        dialect.eps: model.norm_eps,
        dialect.activation: _activation(model),
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        **_write_attention(model),
        **_write_mlp(model),
    }
    _refuse_losses(model, read_config(config, model.name))
    return config


def _activation(model: Model) -> str:
    """The family's own name, if the function has several."""
    usual = DIALECTS[model.family].default_activation
    if ACTIVATIONS[usual] == model.activation:
        return usual
    return next(key for key, ours in ACTIVATIONS.items() if ours == model.activation)


def _refuse_losses(model: Model, read_back: Model) -> None:
    """Raise for settings without a key in a family's config, which would be lost silently."""
    lost = [key for key in type(model).model_fields if getattr(model, key) != getattr(read_back, key)]
    if lost:
        wrong = ", ".join(f"{key}={getattr(model, key)!r}" for key in lost)
        raise BadInput(f"{model.name}: a {model.family} config.json cannot say {wrong}", "use another family")


def _write_attention(model: Model) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if model.family not in GPT:
        config["num_key_value_heads"] = model.kv_heads
        if model.latent is None:
            config["head_dim"] = model.head_dim
    if model.family in OPTIONAL_BIAS:
        config["attention_bias"] = model.qkv_bias
    if model.family != "gpt2":
        config |= write_rope(model, DIALECTS[model.family].rope)
    if model.latent is not None:
        config |= {
            "q_lora_rank": model.latent.q_rank,
            "kv_lora_rank": model.latent.kv_rank,
            "qk_nope_head_dim": model.latent.nope_dim,
            "qk_rope_head_dim": model.latent.rope_dim,
            "v_head_dim": model.latent.value_dim,
        }
    if model.family in GEMMA:
        config |= {
            "query_pre_attn_scalar": _whole_number(model.query_width or model.head_dim),
            "attn_logit_softcapping": model.attention_cap,
            "final_logit_softcapping": model.logit_cap,
        }
    if model.family == "gemma3_text" and model.window_theta is not None:
        config[LOCAL_THETA] = model.window_theta
    return config | _write_windows(model)


def _whole_number(value: float) -> float:
    """As an int if it is one: transformers accepts no other number here."""
    return int(value) if value == int(value) else value


def _write_windows(model: Model) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if model.family.startswith("qwen"):
        config["use_sliding_window"] = model.window is not None
    if model.family.startswith("qwen") or model.family in ("mistral", "mixtral", "phi3", *GEMMA):
        config["sliding_window"] = model.window  # absent differs from null
    if (model.family in ("qwen2", "qwen3") and model.window is not None) or model.family in GEMMA:
        windows = [model.layer_window(layer) for layer in range(model.layers)]
        config["layer_types"] = [
            "full_attention" if each is None else "sliding_attention" for each in windows
        ]
    return config


def _write_mlp(model: Model) -> dict[str, Any]:
    if model.family == "llama":
        return {"mlp_bias": model.mlp_bias}
    if model.family == "gpt_neox":
        return {"use_parallel_residual": model.parallel_residual}
    if model.experts is None or model.family not in EXPERT_COUNT:
        return {}
    experts = model.experts
    config: dict[str, Any] = {
        EXPERT_COUNT[model.family][0]: experts.count,
        "num_experts_per_tok": experts.active,
    }
    if model.family != "mixtral":
        config |= {"moe_intermediate_size": experts.ffn, "norm_topk_prob": experts.normalized}
    if model.family == "qwen3_moe":
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(experts.dense_layers)}
    if model.family == "deepseek_v3":
        config |= {
            "n_shared_experts": experts.shared,
            "first_k_dense_replace": len(experts.dense_layers),
            "n_group": experts.groups,
            "topk_group": experts.active_groups,
            "routed_scaling_factor": experts.scale,
        }
    return config
