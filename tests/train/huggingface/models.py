"""Tiny random models of every family, made, saved and loaded by ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

SMALL = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 11},
    "qwen2": GROUPED | {"tie_word_embeddings": True},
    "qwen3": GROUPED | {"head_dim": 12},
    # Caps near the scores and logits that such small networks have; Gemma 3's bases are no powers of each other.
    "gemma2": GROUPED
    | {
        "head_dim": 12,
        "sliding_window": 11,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": GROUPED
    | {
        "head_dim": 12,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 3e5,
        "rope_local_base_freq": 2e3,
    },
    "phi3": GROUPED | {"partial_rotary_factor": 0.5},
    "gpt2": {"vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": SMALL | {"rotary_pct": 0.5},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": GROUPED
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "deepseek_v3": SMALL
    | {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    },
}


def save_random(family: str, path: Path, **changes: Any) -> nn.Module:
    """A model directory as ``transformers`` writes it; norms and biases too are far from what they begin with."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family,
        **{**FAMILIES[family], "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None, **changes},
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    return model


def attention_of(path: Path) -> str:
    """SDPA knows no cap: of a family that has one, transformers computes it step by step."""
    family = transformers.AutoConfig.from_pretrained(path).model_type
    return "eager" if family == "gemma2" else "sdpa"


def load(path: Path) -> nn.Module:
    """As a user would. Every weight has to be found in the files."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, attn_implementation=attention_of(path)
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()
