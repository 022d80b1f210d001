"""Export a model's shape to Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.facts.model import Experts, Latent, Model
from shoal.predict.workload import Workload

# The balance-loss weight in Megatron-Core's Mixtral recipes.
USUAL_BALANCE = 1e-2


def arguments(workload: Workload) -> Iterator[list[str]]:
    """Layers and widths, positions, norms and activation, experts, vocabulary."""
    model = workload.model
    yield ["--num-layers", str(model.layers), "--hidden-size", str(model.hidden)]
    yield ["--ffn-hidden-size", str(model.ffn), "--num-attention-heads", str(model.heads)]
    if model.latent is not None:
        yield from _latent(model.latent)
    else:
        yield ["--kv-channels", str(model.head_dim)]
        if model.kv_heads != model.heads:
            yield ["--group-query-attention", "--num-query-groups", str(model.kv_heads)]
    yield from _positions(workload)
    yield [
        "--normalization",
        "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "--norm-epsilon",
        str(model.norm_eps),
    ]
    if model.qk_norm:
        yield ["--qk-layernorm"]
    if model.gated:
        yield ["--swiglu"]
    elif model.activation != "gelu_tanh":
        yield ["--no-bias-gelu-fusion"]  # the fused one is the tanh approximation
    if not (model.out_bias or model.mlp_bias):
        yield ["--disable-bias-linear"]
        if model.qkv_bias:
            yield ["--add-qkv-bias"]
    if not model.tied:
        yield ["--untie-embeddings-and-output-weights"]
    if model.experts is not None:
        yield from _experts(model.experts, model.layers)
        for name, value in balance(workload).items():
            yield [f"--moe-{name.replace('_', '-')}", str(value)]
        if workload.recipe.precision == "bf16":
            yield ["--moe-grouped-gemm"]  # not in other precisions
    # Its null tokenizer adds an end-of-document token to the given vocabulary.
    yield ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab - 1)]
    yield ["--make-vocab-size-divisible-by", "1"]


def _positions(workload: Workload) -> Iterator[list[str]]:
    model = workload.model
    yield ["--max-position-embeddings", str(max(model.max_positions, workload.recipe.seq))]
    if model.positions == "learned":
        yield ["--position-embedding-type", "learned_absolute"]
        return
    yield ["--position-embedding-type", "rope", "--rotary-base", str(int(model.rope_theta))]
    if model.rope_fraction != 1:
        yield ["--rotary-percent", str(model.rope_fraction)]
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        yield ["--use-rope-scaling", "--rope-scaling-factor", str(scaling.factor)]
    if scaling is not None and scaling.kind == "yarn" and model.latent is not None:
        yield ["--rotary-scaling-factor", str(scaling.factor)]
        yield ["--mscale", str(scaling.mscale or 1.0), "--mscale-all-dim", str(scaling.mscale_all_dim or 0.0)]
    if model.window is not None:
        # How many earlier tokens are visible, and how many later ones.
        yield ["--window-size", f"{model.window - 1},0"]
        if model.window_layers is not None:
            pattern = ",".join(str(int(layer in model.window_layers)) for layer in range(model.layers))
            yield ["--window-attn-skip-freq", f"[{pattern}]"]


def _latent(latent: Latent) -> Iterator[list[str]]:
    yield ["--multi-latent-attention", "--kv-lora-rank", str(latent.kv_rank)]
    if latent.q_rank is not None:
        yield ["--q-lora-rank", str(latent.q_rank)]
    yield ["--qk-head-dim", str(latent.nope_dim), "--qk-pos-emb-head-dim", str(latent.rope_dim)]
    yield ["--v-head-dim", str(latent.value_dim)]


def _experts(experts: Experts, layers: int) -> Iterator[list[str]]:
    yield ["--num-experts", str(experts.count), "--moe-router-topk", str(experts.active)]
    yield ["--moe-ffn-hidden-size", str(experts.ffn)]
    yield ["--moe-token-dispatcher-type", "alltoall"]
    yield ["--moe-router-score-function", experts.score]
    if experts.shared_ffn:
        yield ["--moe-shared-expert-intermediate-size", str(experts.shared_ffn)]
    if experts.dense_layers:
        pattern = ",".join(str(int(layer not in experts.dense_layers)) for layer in range(layers))
        yield ["--moe-layer-freq", f"[{pattern}]"]
    if experts.groups > 1:
        yield [
            "--moe-router-num-groups",
            str(experts.groups),
            "--moe-router-group-topk",
            str(experts.active_groups),
        ]
    if experts.scale != 1:
        yield ["--moe-router-topk-scaling-factor", str(experts.scale)]
    if experts.router_bias:
        yield ["--moe-router-enable-expert-bias"]


def balance(workload: Workload) -> dict[str, str | float]:
    """What balances the experts: the recipe's loss, the router's bias, or the usual loss there."""
    recipe, experts = workload.recipe, workload.model.experts
    if experts is not None and experts.router_bias and not recipe.router_aux:
        return {"router_load_balancing_type": "none"}
    found: dict[str, str | float] = {
        "router_load_balancing_type": "seq_aux_loss",  # per sequence, as ours
        "aux_loss_coeff": recipe.router_aux or USUAL_BALANCE,
    }
    return found | ({"z_loss_coeff": recipe.router_z} if recipe.router_z else {})


def gemma_only(model: Model) -> Iterator[str]:
    """Gemma features that neither these arguments nor NeMo's plain model can express."""
    odd = {
        "norms behind attention and MLP; nearest: none": model.output_norms,
        "norms times 1 + weight; nearest: times weight": model.norm_offset,
        "embeddings times √hidden; nearest: as they are": model.scaled_embedding,
        "capped scores or logits; nearest: uncapped": (model.attention_cap or model.logit_cap) is not None,
        "scores that are not divided by √head_dim; nearest: so": model.query_width is not None,
        "a rotary base of layers with a window; nearest: one for all": model.window_theta is not None,
    }
    return (f"{model.name}: {what}" for what, has in odd.items() if has)


def cannot(workload: Workload) -> Iterator[str]:
    """Shape features that Megatron's core does not support."""
    model, tp = workload.model, workload.layout.tp
    if model.experts is not None and not (model.experts.router_bias or workload.recipe.router_aux):
        yield f"router_aux=0 without a router's bias: experts would fall idle; nearest: a weight of {USUAL_BALANCE}"
    if model.parallel_residual:
        yield f"{model.name}: attention and MLP side by side; nearest: one after the other"
    if model.rope_scaling is not None and model.rope_scaling.kind != "llama3" and model.latent is None:
        yield f"{model.name}: rotary positions scaled by {model.rope_scaling.kind}; nearest: unscaled"
    if model.gated and model.activation != "silu":
        yield f"{model.name}: a gated {model.activation}; nearest: SwiGLU"
    if not model.gated and model.activation not in ("gelu", "gelu_tanh"):
        yield f"{model.name}: activation {model.activation}; nearest: gelu"
    yield from gemma_only(model)
    if model.experts is not None and not model.experts.normalized:
        yield f"{model.name}: weights of a token's experts that do not sum to one; nearest: such that do"
    if model.vocab % tp:
        yield f"a vocabulary of {model.vocab} over tp={tp}: nearest: padded to {-(-model.vocab // tp) * tp}"
