"""The decoder against transformers: same weights in, same logits and gradients out, for every family."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gemma2 import modeling_gemma2 as gemma2

from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import canonical_parameters
from shoal.facts.model.huggingface import read_config
from shoal.facts.model.parameters import CORRECTION
from shoal.models.decoder import Network, build
from shoal.models.huggingface import from_tensors

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 16}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    "llama grouped": ("llama", GROUPED),
    "llama biases": ("llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", GROUPED | {"tie_word_embeddings": True}),
    "llama wide heads": ("llama", GROUPED | {"head_dim": 12}),
    "llama llama3": (
        "llama",
        GROUPED
        | {
            "rope_parameters": STRETCHED
            | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        },
    ),
    "llama linear": ("llama", GROUPED | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "llama dynamic": (
        "llama",
        GROUPED | {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 16},
    ),
    "llama yarn": ("llama", GROUPED | {"rope_parameters": STRETCHED | {"rope_type": "yarn"}}),
    "llama yarn, said in full": (
        "llama",
        GROUPED
        | {
            "rope_parameters": STRETCHED
            | {
                "rope_type": "yarn",
                "beta_fast": 8.0,
                "beta_slow": 0.5,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "truncate": False,
            }
        },
    ),
    "mistral": ("mistral", GROUPED | {"sliding_window": None}),
    "mistral windowed": ("mistral", GROUPED | {"sliding_window": 5}),
    "qwen2": ("qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen2 windowed above": (
        "qwen2",
        GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 12}),
    "phi3": ("phi3", GROUPED | {"pad_token_id": None}),
    "phi3 windowed, in part": (
        "phi3",
        GROUPED | {"partial_rotary_factor": 0.5, "sliding_window": 5, "pad_token_id": None},
    ),
    "gpt2": ("gpt2", {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox parallel": ("gpt_neox", SMALL | {"rotary_pct": 0.5}),
    "gpt_neox sequential": ("gpt_neox", SMALL | {"rotary_pct": 0.25, "use_parallel_residual": False}),
}
LENGTH = 24
# Caps near the scores and logits of such small networks, so that they bend them.
GEMMA = GROUPED | {
    "head_dim": 12,
    "sliding_window": 5,
    "final_logit_softcapping": 2.0,
    "pad_token_id": None,  # its row would have no gradient
}
CASES |= {
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 20}),
    "gemma2 without caps": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma2, head apart": (
        "gemma2",
        GEMMA | {"tie_word_embeddings": False, "layer_types": ["full_attention"] * 2},
    ),
    "gemma3_text": (
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3_text, stretched": (
        "gemma3_text",
        GEMMA
        | {
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            },
        },
    ),
}
ROUTED = GROUPED | {"num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 12}
LATENT = SMALL | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
CASES |= {
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, one expert a token": ("mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", ROUTED | {"num_experts": 8, "norm_topk_prob": True}),
    "qwen3_moe, weights as they are": ("qwen3_moe", ROUTED | {"num_experts": 8, "norm_topk_prob": False}),
    # More experts than some of them see a token for, and a layer with an ordinary MLP.
    "qwen3_moe, some in use": (
        "qwen3_moe",
        ROUTED | {"num_experts": 96, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "deepseek_v3": ("deepseek_v3", LATENT | {"first_k_dense_replace": 1}),
    "deepseek_v3, queries direct": (
        "deepseek_v3",
        LATENT
        | {
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v3, stretched": (
        "deepseek_v3",
        LATENT
        | {
            "rope_parameters": STRETCHED
            | {"rope_type": "yarn", "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.7}
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_fp32(case: str) -> None:
    reference, network, tokens, positions = pair(case, torch.float32)
    with torch.no_grad():
        expected = reference(tokens, position_ids=positions).logits
        logits = network.lm_head.logits(network(tokens, positions))
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        "llama grouped",
        "mistral windowed",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma2, head apart",
        "gemma3_text",
        "phi3",
        "gpt2",
        "gpt_neox parallel",
        "mixtral",
        "qwen3_moe",
        "qwen3_moe, some in use",
        "deepseek_v3",
        "deepseek_v3, queries direct",
    ],
)
def test_logits_and_gradients_fp64(case: str) -> None:
    reference, network, tokens, positions = pair(case, torch.float64)
    targets = tokens.roll(-1, 1)

    with widened(reference, network.shape):
        expected = reference(tokens, position_ids=positions).logits
        nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    hidden = network(tokens, positions)
    loss, count = network.lm_head(hidden, targets)
    loss.backward()

    assert int(count) == targets.numel()
    assert (network.lm_head.logits(hidden) - expected).abs().max() < 1e-10
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    # Nothing is differentiated by what only chooses.
    gradients |= {name: torch.zeros_like(one) for name, one in corrections(reference)}
    wanted = canonical(gradients, network.shape)
    assert set(wanted) == {name for name, _ in network.named_parameters()}
    for name, parameter in network.named_parameters():
        if parameter.grad is None:
            assert name.endswith(CORRECTION)
            continue
        scale = wanted[name].abs().max()
        # A bias on keys moves all scores of a query alike: its gradient is zero but for rounding.
        assert scale > 0.01 or name.endswith("k_proj.bias"), name
        assert (parameter.grad - wanted[name]).abs().max() < 1e-9 * max(float(scale), 1.0), name


def pair(case: str, dtype: torch.dtype) -> tuple[nn.Module, Network, Tensor, Tensor]:
    """transformers' network with random weights, ours with the same ones, tokens and positions."""
    family, arguments = CASES[case]
    torch.manual_seed(0)
    # SDPA knows no cap, and transformers has no way of its own but this one.
    kernel = "eager" if family == "gemma2" else "sdpa"
    config = transformers.AutoConfig.for_model(family, attn_implementation=kernel, **arguments)
    config._experts_implementation = "eager"  # its grouped product knows no fp64
    reference = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    reference.eval()
    with torch.no_grad():
        for parameter in (
            *reference.parameters(),
            *(one for _, one in corrections(reference)),
        ):  # norms and biases too, and far from a linear network
            parameter.add_(torch.randn_like(parameter) * 0.15)

    model = read_config(config.to_dict(), case)
    network = build(model, compute=dtype, dtype=dtype, device="cpu", length=LENGTH)
    weights = canonical(dict([*reference.named_parameters(), *corrections(reference)]), model)
    network.load_state_dict(weights)
    tokens = torch.randint(0, model.vocab, (2, LENGTH))
    return reference, network, tokens, torch.arange(LENGTH).expand(2, LENGTH)


def corrections(reference: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, one) for name, one in reference.named_buffers() if name.endswith(CORRECTION)]


def canonical(tensors: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Tensors under transformers' names, put under ours by the declared views."""
    if model.family == "gpt_neox":  # in memory it is lm_head, on the hub embed_out
        tensors = {name.replace("lm_head.", "embed_out."): tensor for name, tensor in tensors.items()}
    if model.experts is not None:
        tensors = dict(_on_the_hub(tensors, model))
    dtype = next(iter(tensors.values())).dtype
    ours = {name: torch.full(shape, math.nan, dtype=dtype) for name, shape, _ in canonical_parameters(model)}
    from_tensors(model, tensors.__getitem__, ours)
    return ours


def _on_the_hub(tensors: dict[str, Tensor], model: Model) -> Iterator[tuple[str, Tensor]]:
    """In memory transformers stacks a layer's experts, and gate on up; in a file each matrix is by itself."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if model.family == "mixtral" else {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        if names:
            path = path.replace(".mlp.", ".block_sparse_moe.").replace(".mlp", ".block_sparse_moe")
        if not path.endswith(".experts"):
            yield f"{path}.{leaf}", tensor
            continue
        matrices = {leaf: tensor}
        if leaf == "gate_up_proj":
            matrices = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
        for kind, stacked in matrices.items():
            for expert, matrix in enumerate(stacked):
                yield f"{path}.{expert}.{names.get(kind, kind)}.weight", matrix


@contextmanager
def widened(reference: nn.Module, model: Model) -> Iterator[None]:
    """transformers computes RMS norms, rotary tables and routing in fp32 even for fp64: here they are in fp64."""

    def rms_norm(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if model.norm_offset:
            return nn.functional.rms_norm(inputs[0], module.weight.shape, 1 + module.weight, module.eps)
        return nn.functional.rms_norm(inputs[0], module.weight.shape, module.weight, module.variance_epsilon)

    def tables(module: nn.Module, inputs: Any, named: Any, output: Any) -> tuple[Tensor, Tensor]:
        (length, width), theta = output[0].shape[-2:], model.rope_theta
        if "sliding_attention" in (*inputs[2:], *named.values()):
            theta = model.window_theta or theta
        turning = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(length, dtype=torch.float64)[None, :, None] * turning.repeat(2)
        return angles.cos(), angles.sin()

    def routing(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if model.family == "deepseek_v3":
            return sigmoid_routing(module, inputs[0].reshape(-1, module.hidden_dim), output)
        logits = nn.functional.linear(inputs[0].reshape(-1, module.hidden_dim), module.weight)
        weights, chosen = logits.softmax(-1).topk(module.top_k, dim=-1)
        assert torch.equal(chosen, output[2])
        if getattr(module, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    def sigmoid_routing(module: Any, x: Tensor, output: Any) -> Any:
        logits = nn.functional.linear(x, module.weight)
        weights = logits.sigmoid().gather(1, output[2])
        return (
            logits,
            weights / (weights.sum(-1, keepdim=True) + 1e-20) * module.routed_scaling_factor,
            output[2],
        )

    def capped(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        """Softmax too: as transformers' own but for its fp32."""
        keys, values = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
        scores = query @ keys.mT * scaling
        if (cap := others["softcap"]) is not None:
            scores = (scores / cap).tanh() * cap
        return ((scores + mask).softmax(-1) @ values).transpose(1, 2), None

    handles = []
    gemma2.eager_attention_forward, own = capped, gemma2.eager_attention_forward
    for module in reference.modules():
        if type(module).__name__.endswith("RMSNorm"):
            handles.append(module.register_forward_hook(rms_norm))
        if type(module).__name__.lower().endswith("topkrouter"):
            handles.append(module.register_forward_hook(routing))
        if type(module).__name__.endswith("RotaryEmbedding"):
            handles.append(module.register_forward_hook(tables, with_kwargs=True))
    yield
    gemma2.eager_attention_forward = own
    for handle in handles:
        handle.remove()
