"""The table of tensors: names, shapes, how tensor ranks split each, and whether it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from shoal.facts.model import Adapters, Experts, Family, Latent, Model

# deepseek_v3's correction of expert scores in the choice of experts: updated from token counts, not by gradients.
CORRECTION = "e_score_correction_bias"
# The two ends of the vocabulary, one matrix in a tied model.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
POSITIONS = "model.embed_positions.weight"  # learned positions
# LoRA's two factors beside a projection: into the low-rank space, [rank, in], and out of it, [out, rank].
LORA_FACTORS = ("lora_A", "lora_B")
# DoRA's row lengths beside them, under PEFT's name.
MAGNITUDE = "lora_magnitude_vector"
# The suffix of a router matrix's canonical name.
ROUTER = ".mlp.gate.weight"
# Norms of the outputs of attention and MLP, in models that have them.
ATTENTION_OUTPUT_NORM, MLP_OUTPUT_NORM = "attention_output_norm", "mlp_output_norm"

Kind = Literal["embedding", "position", "attention", "mlp", "expert", "router", "norm", "head", "adapter"]
# How tensor ranks split it: by output features, which stay apart; by input features, whose products are summed; by
# vocabulary rows; or not at all.
Split = Literal["column", "row", "vocabulary", "none"]


# The prefix of block parameters' canonical names.
BLOCKS = "model.layers."
# Families whose projections are modules of their own in transformers, under the names that they have here.
UNFUSED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"),
    *("mixtral", "qwen3_moe", "deepseek_v3"),
)


def block_of(name: str) -> int | None:
    """The block index in a canonical name; None outside the blocks."""
    return int(name.removeprefix(BLOCKS).partition(".")[0]) if name.startswith(BLOCKS) else None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor. One that is not trained, deepseek_v3's router correction, has a gradient of zero.

    Splits apply to the canonical tensors alone (``llama_parameters``), since only these are computed with.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None  # None: outside the layers
    kind: Kind  # "expert" is a routed expert; shared experts are "mlp"
    decayed: bool  # whether weight decay applies: not for norms and biases
    split: Split = "none"
    # The most parts: key/value heads are not split; with more tensor ranks than heads, neighbours share one.
    heads: int | None = None
    partial: bool = False  # whole on every tensor rank, but used for only some features or heads
    trained: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def parameters(model: Model) -> Iterator[Parameter]:
    """Every trained tensor of a checkpoint, from embedding to head. A tied head is not a second tensor.

    With adapters, only those: frozen weights stay in the base model.
    """
    if model.adapters is not None:
        yield from adapter_parameters(model)
        return
    table = _TABLES.get(model.family, _LLAMA)
    yield from table.before(model)
    for layer in range(model.layers):
        yield from table.layer(model, layer, model.experts.count if model.experts else 0)
    yield from table.after(model)


def llama_parameters(model: Model) -> Iterator[Parameter]:
    """The same network under Llama's names and layout, for any family; a layer's routed experts are stacked."""
    if model.adapters is not None:
        yield from adapter_parameters(model)
        return
    yield from _llama_before(model)
    for layer in range(model.layers):
        yield from _llama_layer(model, layer, 0)
        if model.has_experts(layer):
            yield from stacked_experts(model, layer)
    yield from _llama_after(model)


@lru_cache(maxsize=64)
def by_name(model: Model) -> Mapping[str, Parameter]:
    """The canonical tensors, including frozen ones and a tied model's head, of which a stage may have a copy."""
    base = model.base
    found = (*llama_parameters(base), *end_parameters(base).head, *adapter_parameters(model))
    return {one.name: one for one in found}


@lru_cache(maxsize=256)
def block_parameters(model: Model, with_experts: bool) -> tuple[Parameter, ...]:
    """The parameters of one block of that kind, named as in the first one; empty if there is no such block."""
    kinds = (layer for layer in range(model.layers) if model.has_experts(layer) == with_experts)
    return tuple(_llama_layer(model, layer, 0) if (layer := next(kinds, None)) is not None else ())


class EndParameters(NamedTuple):
    embedding: tuple[Parameter, ...]  # with learned positions
    norm: tuple[Parameter, ...]
    head: tuple[Parameter, ...]


@lru_cache(maxsize=256)
def end_parameters(model: Model) -> EndParameters:
    """The parameters outside the blocks, including a tied model's head, since a pipeline's last stage has a copy."""
    after = tuple(_llama_after(model.model_copy(update={"tied": False})))
    norm, head = (tuple(one for one in after if one.kind == kind) for kind in ("norm", "head"))
    return EndParameters(tuple(_llama_before(model)), norm, head)


@lru_cache(maxsize=256)
def expert_parameters(model: Model) -> tuple[Parameter, ...]:
    """The parameters of one routed expert."""
    return tuple(_expert("model.layers.0.mlp.experts.0", model, model.experts, 0)) if model.experts else ()


@lru_cache(maxsize=256)
def attention_projections(model: Model) -> tuple[str, ...]:
    """Attention's projections by their last names, as in adapter targets."""
    block = block_parameters(model, model.has_experts(0))
    found = (one.name.rsplit(".", 2)[-2] for one in block if one.kind == "attention" and len(one.shape) == 2)
    return tuple(found)


@lru_cache(maxsize=256)
def projections(model: Model) -> tuple[str, ...]:
    """Of blocks of every kind, by their last names: what adapters can stand beside."""
    every = (*block_parameters(model, False), *block_parameters(model, True))
    return tuple(
        dict.fromkeys(one.name.rsplit(".", 2)[-2] for one in every if is_matrix(one.name, one.shape))
    )


class InStack(NamedTuple):
    """The position of an expert's matrix in the stack of its layer."""

    stack: str
    place: int  # among the matrices of one expert
    each: int  # matrices per expert


# Each expert's gate and up, one after the other, so that one product computes both; and the down projections.
STACKS = {
    "gate_proj": InStack("gate_up_proj", 0, 2),
    "up_proj": InStack("gate_up_proj", 1, 2),
    "down_proj": InStack("down_proj", 0, 1),
}


def stacked_experts(model: Model, layer: int) -> Iterator[Parameter]:
    """The routed experts of a layer: [2·experts, ffn, hidden], alternating gate and up, and [experts, hidden, ffn]."""
    assert model.experts is not None
    prefix = f"model.layers.{layer}.mlp.experts"
    for one in _expert(prefix, model, model.experts, layer):
        stack, place, each = STACKS[one.name.rsplit(".", 2)[-2]]
        if place == 0:
            count = each * model.experts.count
            yield replace(one, name=f"{prefix}.{stack}.weight", shape=(count, *one.shape))


def adapters(parameter: Parameter, given: Adapters) -> Iterator[Parameter]:
    """LoRA's two factors of a projection, [rank, in] and [out, rank]; none for projections that are not targets.

    The factor on the split side of its projection is split with it; the other is whole on every tensor rank. DoRA's
    lengths, which come first, are split like the projection's outputs.
    """
    module, rank = parameter.name.rsplit(".", 2)[-2], given.rank
    if module not in given.targets or not is_matrix(parameter.name, parameter.shape):
        return
    (outputs, inputs), prefix = parameter.shape, parameter.name.removesuffix(".weight")
    by_rows = parameter.split == "row"
    into = ("row", None, False) if by_rows else ("none", None, parameter.split != "none")
    out = ("none", None, True) if by_rows else (parameter.split, parameter.heads, False)
    first, second = (f"{prefix}.{factor}.weight" for factor in LORA_FACTORS)
    if given.kind == "dora":
        yield Parameter(f"{prefix}.{MAGNITUDE}", (outputs,), parameter.layer, "adapter", False, *out)
    for name, shape, placed in ((first, (rank, inputs), into), (second, (outputs, rank), out)):
        yield Parameter(name, shape, parameter.layer, "adapter", True, *placed)


def adapter_parameters(model: Model) -> Iterator[Parameter]:
    """The adapters of all blocks, in forward order; none for a model without adapters."""
    if model.adapters is None:
        return
    for layer in range(model.layers):
        for parameter in _llama_layer(model, layer, 0):
            yield from adapters(parameter, model.adapters)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a canonical block tensor is a projection: not a router, and not of a routed expert."""
    return name.startswith(BLOCKS) and len(shape) == 2 and not name.endswith(ROUTER) and not is_adapter(name)


def is_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Whether it is a projection of all routed experts of a block."""
    return name.startswith(BLOCKS) and len(shape) == 3


def is_adapter(name: str) -> bool:
    """Whether a canonical name is an adapter's."""
    return name.endswith((*(f".{factor}.weight" for factor in LORA_FACTORS), f".{MAGNITUDE}"))


def beside(name: str) -> str:
    """The weight that an adapter belongs to, by canonical names."""
    for factor in LORA_FACTORS:
        name = name.removesuffix(f".{factor}.weight")
    return f"{name.removesuffix(f'.{MAGNITUDE}')}.weight"


def parameter_count(model: Model) -> int:
    """All trained parameters, without deepseek_v3's multi-token-prediction layer."""
    return _count(model, model.experts.count if model.experts else 0)


def active_parameter_count(model: Model) -> int:
    """The parameters that one token uses: all but inactive routed experts.

    Embedding, head, routers and shared experts count in full.
    """
    return _count(model, model.experts.active if model.experts else 0)


def _count(model: Model, experts: int) -> int:
    """Counts one layer of each kind, with or without experts, since a giant has 40,000 expert tensors in all."""
    table = _TABLES.get(model.family, _LLAMA)
    total = sum(one.size for one in (*table.before(model), *table.after(model)))
    sparse = [layer for layer in range(model.layers) if model.has_experts(layer)]
    dense = [layer for layer in range(model.layers) if not model.has_experts(layer)]
    for layers in (sparse, dense):
        if layers:
            trained = (one.size for one in table.layer(model, layers[0], experts) if one.trained)
            total += len(layers) * sum(trained)
    return total


# Llama's names, shared by mistral, qwen2, qwen3, qwen3_moe and deepseek_v3.


def _llama_before(model: Model) -> Iterator[Parameter]:
    shape = (model.vocab, model.hidden)
    yield Parameter(EMBEDDING, shape, None, "embedding", True, "vocabulary")
    if model.positions == "learned":
        shape = (model.max_positions, model.hidden)
        yield Parameter(POSITIONS, shape, None, "position", True)


def _llama_layer(model: Model, layer: int, experts: int) -> Iterator[Parameter]:
    prefix = f"model.layers.{layer}"
    norm_bias = model.norm == "layer"
    yield from _norm(f"{prefix}.input_layernorm", model.hidden, layer, norm_bias)
    if model.latent is not None:
        yield from _latent_attention(model, model.latent, layer)
    else:
        yield from _attention(model, layer)
    if model.output_norms:
        yield from _norm(f"{prefix}.{ATTENTION_OUTPUT_NORM}", model.hidden, layer, norm_bias)
    yield from _norm(f"{prefix}.post_attention_layernorm", model.hidden, layer, norm_bias)
    if model.experts is not None and model.has_experts(layer):
        yield from _experts(model, model.experts, layer, experts)
    else:
        yield from _mlp(f"{prefix}.mlp", model, model.ffn, layer)
    if model.output_norms:
        yield from _norm(f"{prefix}.{MLP_OUTPUT_NORM}", model.hidden, layer, norm_bias)


def _llama_after(model: Model) -> Iterator[Parameter]:
    yield from _norm("model.norm", model.hidden, None, model.norm == "layer")
    yield from _head("lm_head", model)


def _attention(model: Model, layer: int) -> Iterator[Parameter]:
    prefix = f"model.layers.{layer}.self_attn"
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    hidden, bias, heads = model.hidden, model.qkv_bias, model.kv_heads
    yield from _linear(f"{prefix}.q_proj", query, hidden, layer, "attention", bias, "column")
    yield from _linear(f"{prefix}.k_proj", key, hidden, layer, "attention", bias, "column", heads)
    yield from _linear(f"{prefix}.v_proj", key, hidden, layer, "attention", bias, "column", heads)
    yield from _linear(f"{prefix}.o_proj", hidden, query, layer, "attention", model.out_bias, "row")
    if model.qk_norm:
        # Every rank norms its own heads with the same weight.
        yield from _norm(f"{prefix}.q_norm", model.head_dim, layer, partial=True)
        yield from _norm(f"{prefix}.k_norm", model.head_dim, layer, partial=True)


def _latent_attention(model: Model, latent: Latent, layer: int) -> Iterator[Parameter]:
    prefix = f"model.layers.{layer}.self_attn"
    hidden, bias = model.hidden, model.qkv_bias
    query = model.heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank is None:
        yield from _linear(f"{prefix}.q_proj", query, hidden, layer, "attention", split="column")
    else:
        yield from _partial(_linear(f"{prefix}.q_a_proj", latent.q_rank, hidden, layer, "attention", bias))
        yield from _norm(f"{prefix}.q_a_layernorm", latent.q_rank, layer, partial=True)
        yield from _linear(f"{prefix}.q_b_proj", query, latent.q_rank, layer, "attention", split="column")
    compressed = latent.kv_rank + latent.rope_dim
    yield from _partial(_linear(f"{prefix}.kv_a_proj_with_mqa", compressed, hidden, layer, "attention", bias))
    yield from _norm(f"{prefix}.kv_a_layernorm", latent.kv_rank, layer, partial=True)
    expanded = model.heads * (latent.nope_dim + latent.value_dim)
    yield from _linear(f"{prefix}.kv_b_proj", expanded, latent.kv_rank, layer, "attention", split="column")
    value = model.heads * latent.value_dim
    yield from _linear(f"{prefix}.o_proj", hidden, value, layer, "attention", model.out_bias, "row")


def _mlp(prefix: str, model: Model, width: int, layer: int) -> Iterator[Parameter]:
    hidden, bias = model.hidden, model.mlp_bias
    if model.gated:
        yield from _linear(f"{prefix}.gate_proj", width, hidden, layer, "mlp", bias, "column")
    yield from _linear(f"{prefix}.up_proj", width, hidden, layer, "mlp", bias, "column")
    yield from _linear(f"{prefix}.down_proj", hidden, width, layer, "mlp", bias, "row")


def _experts(model: Model, experts: Experts, layer: int, count: int) -> Iterator[Parameter]:
    prefix = f"model.layers.{layer}.mlp"
    yield from _linear(f"{prefix}.gate", experts.count, model.hidden, layer, "router")
    if experts.router_bias:
        name = f"{prefix}.gate.{CORRECTION}"
        yield Parameter(name, (experts.count,), layer, "router", False, trained=False)
    if experts.shared:
        yield from _mlp(f"{prefix}.shared_experts", model, experts.shared_ffn, layer)
    for expert in range(count):
        yield from _expert(f"{prefix}.experts.{expert}", model, experts, layer)


def _expert(name: str, model: Model, experts: Experts, layer: int) -> Iterator[Parameter]:
    yield from _linear(f"{name}.gate_proj", experts.ffn, model.hidden, layer, "expert", split="column")
    yield from _linear(f"{name}.up_proj", experts.ffn, model.hidden, layer, "expert", split="column")
    yield from _linear(f"{name}.down_proj", model.hidden, experts.ffn, layer, "expert", split="row")


# Mixtral has Llama's tensors, with other names for experts.
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _mixtral_layer(model: Model, layer: int, experts: int) -> Iterator[Parameter]:
    for parameter in _llama_layer(model, layer, experts):
        name = parameter.name
        if parameter.kind in ("router", "expert"):
            path, module, leaf = name.replace(".mlp.", ".block_sparse_moe.").rsplit(".", 2)
            name = f"{path}.{MIXTRAL_NAMES.get(module, module)}.{leaf}"
        yield replace(parameter, name=name)


# Gemma has two norms more than Llama, and uses Llama's name of the norm before the MLP for the one behind attention.
GEMMA_NAMES = {
    ATTENTION_OUTPUT_NORM: "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    MLP_OUTPUT_NORM: "post_feedforward_layernorm",
}


def _gemma_layer(model: Model, layer: int, experts: int) -> Iterator[Parameter]:
    for parameter in _llama_layer(model, layer, experts):
        path, module, leaf = parameter.name.rsplit(".", 2)
        yield replace(parameter, name=f"{path}.{GEMMA_NAMES.get(module, module)}.{leaf}")


# Phi-3 has Llama's tensors, except for two fused ones: queries, keys and values, and gate and up.


def _phi3_layer(model: Model, layer: int, experts: int) -> Iterator[Parameter]:
    prefix, hidden = f"model.layers.{layer}", model.hidden
    projected = (model.heads + 2 * model.kv_heads) * model.head_dim
    fused = {
        "q_proj": _linear(f"{prefix}.self_attn.qkv_proj", projected, hidden, layer, "attention"),
        "gate_proj": _linear(f"{prefix}.mlp.gate_up_proj", 2 * model.ffn, hidden, layer, "mlp"),
    }
    for parameter in _llama_layer(model, layer, experts):
        module = parameter.name.rsplit(".", 2)[-2]
        if module in fused:
            yield from fused[module]
        elif module not in ("k_proj", "v_proj", "up_proj"):
            yield parameter


# GPT-2. Its linear layers are Conv1D: stored as [in, out], with queries, keys and values in one.


def _gpt2_before(model: Model) -> Iterator[Parameter]:
    yield Parameter("transformer.wte.weight", (model.vocab, model.hidden), None, "embedding", True)
    yield Parameter("transformer.wpe.weight", (model.max_positions, model.hidden), None, "position", True)


def _gpt2_layer(model: Model, layer: int, experts: int) -> Iterator[Parameter]:
    prefix, hidden = f"transformer.h.{layer}", model.hidden
    yield from _norm(f"{prefix}.ln_1", hidden, layer, bias=True)
    yield from _conv1d(f"{prefix}.attn.c_attn", hidden, 3 * hidden, layer, "attention")
    yield from _conv1d(f"{prefix}.attn.c_proj", hidden, hidden, layer, "attention")
    yield from _norm(f"{prefix}.ln_2", hidden, layer, bias=True)
    yield from _conv1d(f"{prefix}.mlp.c_fc", hidden, model.ffn, layer, "mlp")
    yield from _conv1d(f"{prefix}.mlp.c_proj", model.ffn, hidden, layer, "mlp")


def _gpt2_after(model: Model) -> Iterator[Parameter]:
    yield from _norm("transformer.ln_f", model.hidden, None, bias=True)
    yield from _head("lm_head", model)


# GPT-NeoX: queries, keys and values in one, head by head.


def _neox_before(model: Model) -> Iterator[Parameter]:
    yield Parameter("gpt_neox.embed_in.weight", (model.vocab, model.hidden), None, "embedding", True)


def _neox_layer(model: Model, layer: int, experts: int) -> Iterator[Parameter]:
    prefix, hidden = f"gpt_neox.layers.{layer}", model.hidden
    yield from _norm(f"{prefix}.input_layernorm", hidden, layer, bias=True)
    name = f"{prefix}.attention.query_key_value"
    yield from _linear(name, 3 * hidden, hidden, layer, "attention", model.qkv_bias)
    yield from _linear(f"{prefix}.attention.dense", hidden, hidden, layer, "attention", model.out_bias)
    yield from _norm(f"{prefix}.post_attention_layernorm", hidden, layer, bias=True)
    yield from _linear(f"{prefix}.mlp.dense_h_to_4h", model.ffn, hidden, layer, "mlp", model.mlp_bias)
    yield from _linear(f"{prefix}.mlp.dense_4h_to_h", hidden, model.ffn, layer, "mlp", model.mlp_bias)


def _neox_after(model: Model) -> Iterator[Parameter]:
    yield from _norm("gpt_neox.final_layer_norm", model.hidden, None, bias=True)
    yield from _head("embed_out", model)


# Building blocks of every table.


def _linear(
    name: str,
    outputs: int,
    inputs: int,
    layer: int | None,
    kind: Kind,
    bias: bool = False,
    split: Split = "none",
    heads: int | None = None,
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (outputs, inputs), layer, kind, True, split, heads)
    if bias:
        # With a row split it is added once, to the sum.
        yield Parameter(
            f"{name}.bias", (outputs,), layer, kind, False, "none" if split == "row" else split, heads
        )


def _partial(parameters: Iterator[Parameter]) -> Iterator[Parameter]:
    """Mark as whole on every tensor rank, with gradients from this rank's heads only."""
    return (replace(one, partial=True) for one in parameters)


def _conv1d(name: str, inputs: int, outputs: int, layer: int, kind: Kind) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (inputs, outputs), layer, kind, True)
    yield Parameter(f"{name}.bias", (outputs,), layer, kind, False)


def _norm(
    name: str, width: int, layer: int | None, bias: bool = False, partial: bool = False
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,), layer, "norm", False, partial=partial)
    if bias:
        yield Parameter(f"{name}.bias", (width,), layer, "norm", False)


def _head(name: str, model: Model) -> Iterator[Parameter]:
    if not model.tied:
        yield from _linear(name, model.vocab, model.hidden, None, "head", split="vocabulary")


class _Table(NamedTuple):
    before: Callable[[Model], Iterator[Parameter]]
    layer: Callable[[Model, int, int], Iterator[Parameter]]  # last argument: number of routed experts
    after: Callable[[Model], Iterator[Parameter]]


_LLAMA = _Table(_llama_before, _llama_layer, _llama_after)
_TABLES: dict[Family, _Table] = {
    "gemma2": _Table(_llama_before, _gemma_layer, _llama_after),
    "gemma3_text": _Table(_llama_before, _gemma_layer, _llama_after),
    "gpt2": _Table(_gpt2_before, _gpt2_layer, _gpt2_after),
    "mixtral": _Table(_llama_before, _mixtral_layer, _llama_after),
    "phi3": _Table(_llama_before, _phi3_layer, _llama_after),
    "gpt_neox": _Table(_neox_before, _neox_layer, _neox_after),
}
