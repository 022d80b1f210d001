"""Model families in Hugging Face's terms: each family's keys and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.facts.model import Family
from shoal.facts.model.huggingface.rope import RopeKeys


@dataclass(frozen=True)
class Dialect:
    """A family's spellings of the common keys (the first of several is written), and its defaults."""

    architecture: str
    default_positions: int
    layers: tuple[str, ...] = ("num_hidden_layers",)
    hidden: tuple[str, ...] = ("hidden_size",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    positions: tuple[str, ...] = ("max_position_embeddings",)
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    rope: RopeKeys = field(default_factory=RopeKeys)
    default_kv_heads: int | None = None  # None: equal to the query heads
    default_head_dim: int | None = None  # None: hidden / heads
    default_eps: float = 1e-6
    default_activation: str = "silu"
    # Keys that would change the network in a way Shoal does not support, with their one acceptable value.
    fixed: Mapping[str, object] = field(default_factory=dict)


_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
DIALECTS: dict[Family, Dialect] = {
    "llama": Dialect("LlamaForCausalLM", 2048, fixed={"sliding_window": None}),
    "mistral": Dialect("MistralForCausalLM", 131_072, default_kv_heads=8, fixed=_NO_BIAS),
    "qwen2": Dialect("Qwen2ForCausalLM", 32_768, default_kv_heads=32, fixed={"mlp_bias": False}),
    "qwen3": Dialect(
        "Qwen3ForCausalLM", 32_768, default_kv_heads=32, default_head_dim=128, fixed={"mlp_bias": False}
    ),
    "gemma2": Dialect(
        "Gemma2ForCausalLM",
        8192,
        activation="hidden_activation",
        default_kv_heads=4,
        default_head_dim=256,
        default_activation="gelu_pytorch_tanh",
        fixed={"mlp_bias": False},
    ),
    "gemma3_text": Dialect(
        "Gemma3ForCausalLM",
        131_072,
        activation="hidden_activation",
        rope=RopeKeys(default_theta=1e6),
        default_kv_heads=4,
        default_head_dim=256,
        default_activation="gelu_pytorch_tanh",
        # transformers reads this key of a Gemma 3, but ignores it.
        fixed={"mlp_bias": False, "attn_logit_softcapping": None},
    ),
    "phi3": Dialect("Phi3ForCausalLM", 4096, default_eps=1e-5, fixed=_NO_BIAS),
    "gpt2": Dialect(
        "GPT2LMHeadModel",
        1024,
        layers=("n_layer", "num_hidden_layers"),
        hidden=("n_embd", "hidden_size"),
        heads=("n_head", "num_attention_heads"),
        positions=("n_positions", "max_position_embeddings"),
        eps="layer_norm_epsilon",
        activation="activation_function",
        default_eps=1e-5,
        default_activation="gelu_new",
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
    ),
    "gpt_neox": Dialect(
        "GPTNeoXForCausalLM",
        2048,
        eps="layer_norm_eps",
        rope=RopeKeys(
            ("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor"), 10_000.0, 0.25
        ),
        default_eps=1e-5,
        default_activation="gelu",
        fixed={"sliding_window": None},
    ),
    "mixtral": Dialect(
        "MixtralForCausalLM",
        131_072,
        rope=RopeKeys(default_theta=1e6),
        default_kv_heads=8,
        default_eps=1e-5,
        fixed={**_NO_BIAS, "router_jitter_noise": 0.0},
    ),
    "qwen3_moe": Dialect("Qwen3MoeForCausalLM", 32_768, default_kv_heads=4, fixed={"mlp_bias": False}),
    "deepseek_v3": Dialect(
        "DeepseekV3ForCausalLM",
        4096,
        default_kv_heads=128,
        fixed={
            "mlp_bias": False,
            "sliding_window": None,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "rope_interleave": True,
        },
    ),
}

# Synonyms of activation functions; the first of each is written.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
GEMMA = ("gemma2", "gemma3_text")  # norms on both sides (1 + weight), scaled embeddings, windows
GPT = ("gpt2", "gpt_neox")  # layer norms, biases, an ungated MLP, one fused projection of q, k and v
OPTIONAL_BIAS = ("llama", "qwen3", *GEMMA, "gpt_neox", "qwen3_moe", "deepseek_v3")
EXPERT_COUNT = {
    "mixtral": ("num_local_experts", "num_experts"),
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "deepseek_v3": ("n_routed_experts", "num_local_experts"),
}
