"""Import a network's shape from Megatron's options: the reverse of ``plan/export/megatron_model.py``."""

from __future__ import annotations

import ast
from typing import Any

from shoal.facts.model import MOST_LAYERS
from shoal.plan.importers.reading import Reading

# Vocabulary sizes of tokenizers known without their files.
_VOCABULARIES = {"gpt2bpetokenizer": 50257, "llama2tokenizer": 32000}
# Position limits before RoPE scaling.
_ORIGINAL, _LLAMA3_POSITIONS, _LATENT_POSITIONS = "original-max-position-embeddings", 8192, 4096
_NONE = ("experts", "latent", "rope_scaling", "window")  # absent unless given
SWITCHES = {
    *("group-query-attention", "swiglu", "no-bias-gelu-fusion", "disable-bias-linear", "add-qkv-bias"),
    *("untie-embeddings-and-output-weights", "qk-layernorm", "multi-latent-attention", "use-rope-scaling"),
    *("use-rotary-position-embeddings", "no-position-embedding", "moe-router-enable-expert-bias"),
    *("moe-router-pre-softmax", "moe-grouped-gemm", "mock-data", "squared-relu", "apply-layernorm-1p"),
}


def shape(reading: Reading) -> dict[str, Any]:
    """Fields of a model; empty if the options describe none."""
    layers, hidden = reading.count("num-layers"), reading.count("hidden-size")
    heads = reading.count("num-attention-heads")
    if not (layers and hidden and heads):
        return {}
    gated = reading.flag("swiglu")
    ffn = reading.count("ffn-hidden-size") or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    said: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "gated": gated,
        "activation": "silu" if gated else "gelu" if reading.flag("no-bias-gelu-fusion") else "gelu_tanh",
        "parallel_residual": False,
        "qk_norm": reading.flag("qk-layernorm"),
        "tied": not reading.flag("untie-embeddings-and-output-weights"),
        "init_std": reading.number("init-method-std", absent=0.02),
        **_norm(reading),
        **_biases(reading),
        **_heads(reading, hidden, heads),
        **_positions(reading, layers),
        **_experts(reading, layers, ffn),
        **_vocabulary(reading),
    }
    return {key: value for key, value in said.items() if value is not None or key in _NONE}


def _norm(reading: Reading) -> dict[str, Any]:
    kind = reading.word("normalization") or "LayerNorm"
    eps = reading.number("norm-epsilon", absent=1e-5)
    return {"norm": "rms" if kind == "RMSNorm" else "layer", "norm_eps": eps}


def _biases(reading: Reading) -> dict[str, Any]:
    everywhere = not reading.flag("disable-bias-linear")
    alone = reading.flag("add-qkv-bias")
    return {"qkv_bias": everywhere or alone, "out_bias": everywhere, "mlp_bias": everywhere}


def _heads(reading: Reading, hidden: int, heads: int) -> dict[str, Any]:
    width, grouped = reading.count("kv-channels"), reading.flag("group-query-attention")
    groups = reading.count("num-query-groups")
    if reading.flag("multi-latent-attention"):
        latent = {
            "q_rank": reading.count("q-lora-rank"),
            "kv_rank": reading.count("kv-lora-rank", absent=32),
            "nope_dim": reading.count("qk-head-dim", absent=128),
            "rope_dim": reading.count("qk-pos-emb-head-dim", absent=64),
            "value_dim": reading.count("v-head-dim", absent=128),
        }
        width = (latent["nope_dim"] or 0) + (latent["rope_dim"] or 0)
        return {"latent": latent, "kv_heads": heads, "head_dim": width}
    kv_heads = groups if grouped and groups else heads
    return {"latent": None, "kv_heads": kv_heads, "head_dim": width or hidden // heads}


def _positions(reading: Reading, layers: int) -> dict[str, Any]:
    said: dict[str, Any] = {"max_positions": reading.count("max-position-embeddings")}
    kind = reading.word("position-embedding-type") or "learned_absolute"
    old = reading.flag("use-rotary-position-embeddings")
    reading.skip("no-position-embedding")
    base, share = reading.number("rotary-base", absent=10_000), reading.number("rotary-percent", absent=1.0)
    if not (old or kind in ("rope", "yarn")):
        return said | {"positions": "learned", "rope_scaling": None, "window": None}
    said |= {"positions": "rotary", "rope_theta": float(base or 10_000), "rope_fraction": float(share or 1.0)}
    factor = reading.number("rotary-scaling-factor")
    said["rope_scaling"] = None
    if reading.flag("use-rope-scaling"):
        said["rope_scaling"] = {
            "kind": "llama3",
            "factor": float(reading.number("rope-scaling-factor", absent=8.0) or 8.0),
            "original_positions": reading.count(_ORIGINAL, absent=_LLAMA3_POSITIONS),
        }
    elif factor is not None and factor != 1:
        original = reading.count(_ORIGINAL, absent=_LATENT_POSITIONS)
        said["rope_scaling"] = {
            "kind": "yarn",
            "factor": float(factor),
            "original_positions": original,
            "mscale": float(reading.number("mscale", absent=1.0) or 1.0),
            "mscale_all_dim": float(reading.number("mscale-all-dim", absent=0.0) or 0.0),
        }
    return said | _window(reading, layers)


def _window(reading: Reading, layers: int) -> dict[str, Any]:
    written = reading.word("window-size")
    pattern = _pattern(reading.word("window-attn-skip-freq"), layers)
    if written is None:
        return {"window": None}
    before = written.strip("()[] ").split(",")[0].strip()
    if not before.isdigit():
        reading.note(f"window-size {written}: not understood, so attention sees everything")
        return {}
    said: dict[str, Any] = {"window": int(before) + 1}
    if pattern is not None:
        said["window_layers"] = tuple(layer for layer, on in enumerate(pattern) if on)
    return said


def _experts(reading: Reading, layers: int, ffn: int) -> dict[str, Any]:
    count = reading.count("num-experts")
    if not count:
        return {"experts": None}
    width = reading.count("moe-ffn-hidden-size") or ffn
    shared = reading.count("moe-shared-expert-intermediate-size") or 0
    pattern = _pattern(reading.word("moe-layer-freq"), layers)
    groups = reading.count("moe-router-num-groups") or 1
    score = reading.word("moe-router-score-function") or "softmax"
    reading.skip("moe-token-dispatcher-type", "moe-grouped-gemm")
    before = reading.flag("moe-router-pre-softmax")
    return {
        "experts": {
            "count": count,
            "active": reading.count("moe-router-topk", absent=2),
            "ffn": width,
            "shared": shared // width,
            "shared_ffn": shared,
            "dense_layers": tuple(layer for layer, on in enumerate(pattern or ()) if not on),
            "router_bias": reading.flag("moe-router-enable-expert-bias"),
            "groups": groups,
            "active_groups": reading.count("moe-router-group-topk") or 1,
            "score": score,
            "normalized": not (before and score == "softmax"),
            "scale": float(reading.number("moe-router-topk-scaling-factor", absent=1.0) or 1.0),
        }
    }


def _vocabulary(reading: Reading) -> dict[str, Any]:
    kind = (reading.word("tokenizer-type") or "").lower()
    size, padded = reading.count("vocab-size"), reading.count("padded-vocab-size")
    reading.skip("make-vocab-size-divisible-by", "mock-data", "vocab-file", "merge-file")
    if padded:
        return {"vocab": padded}
    if size:
        return {"vocab": size + 1 if kind == "nulltokenizer" else size}
    return {"vocab": _VOCABULARIES.get(kind)}


def _pattern(text: str | None, layers: int) -> list[int] | None:
    """One number per layer: ``[0,1,1]``, ``([0]*3+[1]*58)``, or ``2``, which means every second layer."""
    if text is None or not text.strip():
        return None
    try:
        found = _listed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None
    if isinstance(found, int):
        # More layers than any model may have are rejected later.
        return [int(layer % found == 0) for layer in range(min(layers, MOST_LAYERS))] if found > 0 else None
    return found[:layers]


def _listed(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        items = [_listed(item) for item in node.elts]
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _listed(node.left), _listed(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if (
            isinstance(node.op, ast.Mult)
            and isinstance(left, list)
            and isinstance(right, int)
            and len(left) * right <= MOST_LAYERS
        ):
            return left * right
    raise ValueError("not a pattern of layers")
