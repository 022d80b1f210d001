"""Read a ``config.json`` into a Model. Absent keys take ``transformers``' defaults, except for the sizes that make the
model; what Shoal does not support is rejected, never guessed.

Dropout and the load-balancing loss belong to the recipe, token ids to the tokenizer, quantization to weight storage:
those keys are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.facts.input.foreign_terms import OTHER_MODEL_TYPES
from shoal.facts.input.other_files import not_a_model
from shoal.facts.input.untrusted_files import first_fault
from shoal.facts.model import (
    MOST_EXPERTS,
    MOST_EXPERTS_IN_ALL,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_TOKENS,
    WIDEST_HIDDEN,
    Experts,
    Family,
    Latent,
    Model,
)
from shoal.facts.model.huggingface.dialects import (
    ACTIVATIONS,
    DIALECTS,
    EXPERT_COUNT,
    GEMMA,
    GPT,
    OPTIONAL_BIAS,
)
from shoal.facts.model.huggingface.fields import Fields, load
from shoal.facts.model.huggingface.rope import read_rope, read_window_theta
from shoal.facts.problem import BadInput, did_you_mean


def read_config(source: str | Path | Mapping[str, Any], name: str | None = None) -> Model:
    """The shape that a ``config.json`` (its path, or its content) describes; raises with everything wrong with it."""
    if isinstance(source, Mapping):
        config, where, default_name = source, name or "config.json", "model"
    else:
        path = Path(source)
        config, where = load(path), str(path)
        default_name = path.absolute().parent.name if path.name == "config.json" else path.stem
    family = _family(config, where)
    fields = Fields(config, where)
    _refuse_oddities(fields, family)
    try:
        values = _read_model(fields, family)
        fields.raise_problems()
        return Model.model_validate({"name": name or default_name, "family": family} | values)
    except ValidationError as error:
        # Each number may be valid while a product of two exceeds all limits.
        fields.raise_problems()
        raise BadInput(f"{where}: what follows for {first_fault(error)}", "correct the sizes") from None


def _family(config: Mapping[str, Any], where: str) -> Family:
    written = config.get("model_type")
    for family in DIALECTS:
        if written == family:
            return family
    if written is None and (other := not_a_model(where, config)) is not None:
        raise other
    if written is None:
        raise BadInput(f"{where}: model_type is missing", f"add it: one of {', '.join(DIALECTS)}")
    if written == "gemma3":
        raise BadInput(
            f"{where}: model_type 'gemma3' reads images too",
            "a text model, model_type gemma3_text; a preset such as gemma3-4b has this one's text shape",
        )
    known = f"known: {', '.join(DIALECTS)}"
    fix = known if str(written) in OTHER_MODEL_TYPES else did_you_mean(str(written), DIALECTS)
    raise BadInput(f"{where}: model_type {written!r} is not supported", fix)


def _refuse_oddities(fields: Fields, family: Family) -> None:
    dialect = DIALECTS[family]
    for key, fine in dialect.fixed.items():
        if key in fields.values and fields.values[key] != fine:
            fields.problem(f"{key} = {fields.values[key]!r} is not supported", f"only {fine!r} is")
    body = dialect.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
    # An architecture name of its own means a different network: speculative-decoding heads also call themselves llama.
    for written in fields.items("architectures") or []:
        if str(written).lower() not in (dialect.architecture.lower(), body.lower()):
            fields.problem(f"architecture {written!r} is not supported", f"only {dialect.architecture} is")


def _read_model(fields: Fields, family: Family) -> dict[str, Any]:
    dialect = DIALECTS[family]
    layers = fields.whole(dialect.layers, most=MOST_LAYERS)
    hidden = fields.whole(dialect.hidden, most=WIDEST_HIDDEN)
    if family == "gpt2":
        ffn = fields.optional_whole("n_inner", None) or 4 * hidden
    else:
        ffn = fields.whole("intermediate_size")
    values: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "ffn": ffn,
        "vocab": fields.whole("vocab_size", most=MOST_TOKENS),
        "norm": "layer" if family in GPT else "rms",
        "norm_eps": fields.number(dialect.eps, dialect.default_eps),
        "activation": fields.choice(dialect.activation, dialect.default_activation, ACTIVATIONS),
        "gated": family not in GPT,
        "mlp_bias": family in GPT or (family == "llama" and fields.flag("mlp_bias", False)),
        "tied": fields.flag("tie_word_embeddings", family in ("gpt2", *GEMMA)),
        "init_std": fields.number("initializer_range", 0.02, least=0.0),
    }
    if family == "gpt_neox":
        values["parallel_residual"] = fields.flag("use_parallel_residual", True)
    if family in GEMMA:
        values |= {"norm_offset": True, "output_norms": True, "scaled_embedding": True}
        values["logit_cap"] = fields.optional_number(
            "final_logit_softcapping", 30.0 if family == "gemma2" else None
        )
    if family in EXPERT_COUNT:
        values["experts"] = _read_experts(fields, family, layers, ffn)
    return values | _read_attention(fields, family, layers, hidden)


def _read_attention(fields: Fields, family: Family, layers: int, hidden: int) -> dict[str, Any]:
    dialect = DIALECTS[family]
    heads = fields.whole(dialect.heads)
    max_positions = fields.whole(dialect.positions, dialect.default_positions, most=MOST_POSITIONS)
    latent = _read_latent(fields) if family == "deepseek_v3" else None
    kv_heads, head_dim = _read_heads(fields, family, hidden, heads, latent)
    bias = family in ("qwen2", "gpt2")
    if family in OPTIONAL_BIAS:
        bias = fields.flag("attention_bias", family == "gpt_neox")
    window, window_layers = _read_windows(fields, family, layers)
    values: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": max_positions,
        "positions": "learned" if family == "gpt2" else "rotary",
        "qkv_bias": bias,
        "out_bias": bias and family != "qwen2",
        "qk_norm": family in ("qwen3", "qwen3_moe", "gemma3_text"),
        "window": window,
        "window_layers": window_layers,
        "latent": latent,
    }
    if family in GEMMA:
        values |= _read_gemma_attention(fields, family, head_dim)
    if family == "gemma3_text" and window is not None:
        values["window_theta"] = read_window_theta(fields)
    if family != "gpt2":
        theta, fraction, scaling = read_rope(fields, dialect.rope, max_positions)
        rotating = (latent.rope_dim if latent else head_dim) * fraction
        fields.check(
            fraction == 1.0 or family in ("gpt_neox", "phi3"),
            f"partial_rotary_factor = {fraction:g} is not supported",
            f"for {family} only 1 is",
        )
        fields.check(
            scaling is None or family != "phi3",
            f"rotary scaling {scaling.kind if scaling else None!r} is not supported",
            "phi3 has none, or longrope, which Shoal does not compute",
        )
        fields.check(
            0 < rotating <= head_dim and int(rotating) % 2 == 0,
            f"{rotating:g} of a head's {head_dim} channels would rotate",
            "they do so in pairs: an even number",
        )
        values |= {"rope_theta": theta, "rope_fraction": fraction, "rope_scaling": scaling}
    return values


def _read_gemma_attention(fields: Fields, family: Family, head_dim: int) -> dict[str, Any]:
    """How scores are scaled and capped."""
    both_ways = fields.look("use_bidirectional_attention", None)
    fields.check(
        not both_ways, f"use_bidirectional_attention = {both_ways!r} is not supported", "only false is"
    )
    width = fields.number("query_pre_attn_scalar", 256)
    cap = fields.optional_number("attn_logit_softcapping", 50.0) if family == "gemma2" else None
    return {"query_width": None if width == head_dim else width, "attention_cap": cap}


def _read_heads(
    fields: Fields, family: Family, hidden: int, heads: int, latent: Latent | None
) -> tuple[int, int]:
    """Key/value heads and the width of a head."""
    dialect = DIALECTS[family]
    kv_heads: int = heads
    head_dim: int | None = None
    if family not in GPT:
        kv_heads = fields.optional_whole("num_key_value_heads", dialect.default_kv_heads) or heads
    fields.check(
        heads % kv_heads == 0,
        f"{heads} heads cannot share {kv_heads} key/value heads",
        "the second must divide the first",
    )
    if latent is not None:
        # transformers writes these two, but they follow from others; its head_dim is the rotated part.
        for key, width in (("head_dim", latent.rope_dim), ("qk_head_dim", latent.nope_dim + latent.rope_dim)):
            written = fields.look(key, width)
            fields.check(written == width, f"{key} is {written!r}", f"it follows from the others: {width}")
        fields.check(
            kv_heads == heads,
            f"num_key_value_heads is {kv_heads}",
            f"latent attention has as many as heads: {heads}",
        )
        return kv_heads, latent.nope_dim + latent.rope_dim
    if dialect.default_head_dim is not None:
        head_dim = fields.whole("head_dim", dialect.default_head_dim)
    elif family not in GPT:
        head_dim = fields.optional_whole("head_dim", None)
    # transformers requires this for llama and gemma even if head_dim is given.
    fields.check(
        hidden % heads == 0 or (head_dim is not None and family not in ("llama", *GEMMA)),
        f"{heads} heads do not divide a hidden size of {hidden}",
        "correct one of the two",
    )
    return kv_heads, head_dim or max(hidden // heads, 1)


def _read_windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """The sliding window, and the layers that have it, if not all."""
    window, first = None, 0
    if family in ("mistral", "mixtral", "phi3"):
        default = 4096 if family == "mistral" else None
        window = fields.optional_whole("sliding_window", default, MOST_POSITIONS)
    elif family.startswith("qwen") and fields.flag("use_sliding_window", False):
        window = fields.optional_whole("sliding_window", 4096, MOST_POSITIONS)
        first = fields.whole("max_window_layers", 0 if family == "qwen3_moe" else 28, least=0)
        if family == "qwen3_moe" and first and window is not None:
            fields.problem(
                f"max_window_layers is {first}", "versions of qwen3_moe disagree on it: only 0 is clear"
            )
    windowed = tuple(range(first, layers)) if window is not None else ()
    if family in GEMMA:
        window = fields.optional_whole("sliding_window", 4096, MOST_POSITIONS)
        # All but every second, or every sixth; files of transformers 4 may have another number.
        turn = 2 if family == "gemma2" else fields.whole("sliding_window_pattern", 6)
        windowed = tuple(layer for layer in range(layers) if (layer + 1) % turn)
    kinds = ["full_attention"] * layers
    for layer in windowed:
        kinds[layer] = "sliding_attention"
    written = fields.items("layer_types")
    if written is not None and written != kinds:
        legal = all(kind in ("full_attention", "sliding_attention") for kind in written)
        fields.check(
            len(written) == layers and legal,
            "layer_types is not supported",
            "full_attention or sliding_attention, one for each layer",
        )
        fields.check(
            family in GEMMA or (window is not None and family in ("qwen2", "qwen3")),
            "layer_types contradicts the sliding window",
            "correct one of the two, or remove it",
        )
        windowed = tuple(layer for layer, kind in enumerate(written) if kind == "sliding_attention")
    fields.check(
        window is not None or not windowed,
        f"sliding_window is null, and layer_types of {len(windowed)} layers sliding_attention",
        "correct one of the two",
    )
    if not windowed:
        return None, None
    return window, None if len(windowed) == layers else windowed


def _read_latent(fields: Fields) -> Latent:
    return Latent(
        q_rank=fields.optional_whole("q_lora_rank", 1536),
        kv_rank=fields.whole("kv_lora_rank", 512),
        nope_dim=fields.whole("qk_nope_head_dim", 128),
        rope_dim=fields.whole("qk_rope_head_dim", 64),
        value_dim=fields.whole("v_head_dim", 128),
    )


def _read_experts(fields: Fields, family: Family, layers: int, ffn: int) -> Experts:
    default_count = {"mixtral": 8, "qwen3_moe": 128, "deepseek_v3": 256}[family]
    count = fields.whole(EXPERT_COUNT[family], default_count, most=MOST_EXPERTS)
    active = fields.whole("num_experts_per_tok", 2 if family == "mixtral" else 8, most=MOST_EXPERTS)
    fields.check(
        layers * count <= MOST_EXPERTS_IN_ALL,
        f"{count} experts in each of {layers} layers",
        f"at most {MOST_EXPERTS_IN_ALL} in all",
    )
    fields.check(active <= count, f"num_experts_per_tok is {active}", f"there are only {count} experts")
    if family == "mixtral":
        return Experts(count=count, active=active, ffn=ffn)
    if family == "qwen3_moe":
        return Experts(
            count=count,
            active=active,
            ffn=fields.whole("moe_intermediate_size", 768),
            dense_layers=_read_dense_layers(fields, layers),
            normalized=fields.flag("norm_topk_prob", False),
        )
    width = fields.whole("moe_intermediate_size", 2048)
    shared = fields.whole("n_shared_experts", 1, most=MOST_EXPERTS)
    groups, active_groups = fields.whole("n_group", 8), fields.whole("topk_group", 4)
    fields.check(
        count % groups == 0 and active_groups <= groups and active * groups <= count * active_groups,
        f"{active} of {count} experts cannot come from {active_groups} of {groups} groups",
        "correct n_group, topk_group or the number of experts",
    )
    return Experts(
        count=count,
        active=active,
        ffn=width,
        shared=shared,
        shared_ffn=shared * width,
        dense_layers=tuple(range(min(layers, fields.whole("first_k_dense_replace", 3, least=0)))),
        router_bias=True,
        groups=groups,
        active_groups=active_groups,
        score="sigmoid",
        normalized=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5),
    )


def _read_dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """qwen3_moe: listed layers, and those that the step skips, keep an ordinary MLP."""
    step = fields.whole("decoder_sparse_step", 1)
    listed = fields.items("mlp_only_layers") or []
    for layer in listed:
        fields.check(
            type(layer) is int and 0 <= layer < layers,
            f"mlp_only_layers names {layer!r}",
            f"layers are 0 to {layers - 1}",
        )
    dense = {layer for layer in listed if type(layer) is int}
    return tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)
