"""Views: every element of a checkpoint is one element of Shoal's parameters, and the numbers survive the way."""

import itertools
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from transformers import AutoConfig, AutoModelForCausalLM

from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import View, canonical_parameters, intersect, views
from shoal.facts.model.huggingface import read_config
from shoal.facts.model.parameters import parameters

LLAMA = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"rotary_pct": 1.0}
GPT2 = {"vocab_size": 10, "n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 6}
# Eleven layers, so that one layer's number is the beginning of another's.
UNTIED = {"n_layer": 11, "n_inner": 12, "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA},
    "mistral": {"model_type": "mistral", **LLAMA},
    "qwen2": {"model_type": "qwen2", **LLAMA},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 6},
    "gemma2": {"model_type": "gemma2", **LLAMA, "head_dim": 6},
    "gemma3_text": {"model_type": "gemma3_text", **LLAMA, "head_dim": 6, "num_hidden_layers": 11},
    "phi3": {"model_type": "phi3", **LLAMA},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt2, untied": {"model_type": "gpt2", **GPT2, **UNTIED},
    "gpt_neox": {"model_type": "gpt_neox", **NEOX},
    "mixtral": {"model_type": "mixtral", **LLAMA, "num_local_experts": 12, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **LLAMA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "mlp_only_layers": [0],
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **LLAMA,
        **{"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2},
        **{"topk_group": 1, "moe_intermediate_size": 6, "first_k_dense_replace": 1, "q_lora_rank": 4},
        **{"kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2},
    },
}
MODELS: dict[str, Model] = {name: read_config(config, name) for name, config in CONFIGS.items()}


def box(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def to_canonical(model: Model, tensors: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    result = {name: numpy.full(shape, numpy.nan) for name, shape, _ in canonical_parameters(model)}
    for view in views(model):
        piece = tensors[view.tensor][box(view.tensor_offset, view.shape)]
        target = box(view.canonical_offset, view.canonical_shape)
        result[view.canonical][target] = piece.T if view.transposed else piece
    return result


def random_tensors(model: Model) -> dict[str, numpy.ndarray]:
    generator = numpy.random.default_rng(0)
    return {parameter.name: generator.normal(size=parameter.shape) for parameter in parameters(model)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_views_cover_both_sides_exactly_once(model: Model) -> None:
    tensor_hits = {parameter.name: numpy.zeros(parameter.shape, int) for parameter in parameters(model)}
    canonical_hits = {name: numpy.zeros(shape, int) for name, shape, _ in canonical_parameters(model)}
    for view in views(model):
        tensor_hits[view.tensor][box(view.tensor_offset, view.shape)] += 1
        canonical_hits[view.canonical][box(view.canonical_offset, view.canonical_shape)] += 1
    for name, hits in [*tensor_hits.items(), *canonical_hits.items()]:
        assert (hits == 1).all(), name
    # A slice beyond the end is cut short without a word; equal totals say that none was.
    elements = sum(hits.size for hits in tensor_hits.values())
    assert elements == sum(hits.size for hits in canonical_hits.values())
    assert elements == sum(math.prod(view.shape) for view in views(model))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_llama_like_families_are_as_they_are(name: str) -> None:
    model = MODELS[name]
    assert all(view.tensor == view.canonical and not view.transposed for view in views(model))
    assert canonical_parameters(model) == [(p.name, p.shape, p.decayed) for p in parameters(model)]


def test_canonical_names_of_gpt2() -> None:
    named = {name: (shape, decayed) for name, shape, decayed in canonical_parameters(MODELS["gpt2"])}
    order = list(named)
    assert order[:2] == ["model.embed_tokens.weight", "model.embed_positions.weight"]
    assert order[-2:] == ["model.norm.weight", "model.norm.bias"]  # tied: no head
    assert named["model.layers.1.mlp.up_proj.weight"] == ((32, 8), True)
    assert named["model.layers.1.mlp.up_proj.bias"] == ((32,), False)
    assert named["model.layers.0.input_layernorm.bias"] == ((8,), False)
    assert "model.layers.0.mlp.gate_proj.weight" not in named


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_separated_projections_compute_what_transformers_computes(name: str) -> None:
    """Queries, keys and values of the first layer: ours, and those that transformers splits off a fused layer."""
    fields = dict(CONFIGS[name])
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields, bos_token_id=0, eos_token_id=0)
    ).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    tensors = {key: value.numpy() for key, value in network.state_dict().items()}
    tensors["embed_out.weight"] = tensors["lm_head.weight"]  # what the file calls it
    canonical = to_canonical(MODELS[name], tensors)
    hidden = torch.randn(1, 3, 8, dtype=torch.float64)
    if name == "gpt2":
        fused = network.transformer.h[0].attn.c_attn(hidden)
        parts = [part.view(1, 3, 4, 2) for part in fused.split(8, dim=2)]
    else:
        fused = network.gpt_neox.layers[0].attention.query_key_value(hidden)
        parts = list(fused.view(1, 3, 4, 6).chunk(3, dim=-1))
    for projection, theirs in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
        prefix = f"model.layers.0.self_attn.{projection}"
        ours = hidden.numpy() @ canonical[f"{prefix}.weight"].T + canonical[f"{prefix}.bias"]
        numpy.testing.assert_allclose(ours.reshape(1, 3, 4, 2), theirs.detach().numpy(), atol=1e-12)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_shards_of_any_size_find_their_elements(model: Model, ranks: int) -> None:
    """Each parameter cut into a grid of shards, each filled and emptied through the boxes alone."""
    tensors = random_tensors(model)
    whole = to_canonical(model, tensors)
    rebuilt = {name: numpy.full_like(tensor, numpy.nan) for name, tensor in tensors.items()}
    by_parameter: dict[str, list[View]] = {}
    for view in views(model):
        by_parameter.setdefault(view.canonical, []).append(view)
    for name, shape, _ in canonical_parameters(model):
        for offset, size in shards(shape, ranks):
            shard = numpy.full(size, numpy.nan)
            for view in by_parameter[name]:
                overlap = intersect(view, offset, size)
                if overlap is None:
                    continue
                there = box(overlap.tensor_offset, overlap.tensor_shape)
                here = box(overlap.slice_offset, overlap.slice_shape)
                piece = tensors[view.tensor][there]
                shard[here] = piece.T if view.transposed else piece
                rebuilt[view.tensor][there] = shard[here].T if view.transposed else shard[here]
            numpy.testing.assert_array_equal(shard, whole[name][box(offset, size)])
    for name, tensor in tensors.items():
        numpy.testing.assert_array_equal(rebuilt[name], tensor)


def shards(shape: tuple[int, ...], ranks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of a grid over all axes, uneven where ``ranks`` does not divide them."""
    axes = []
    for length in shape:
        step = -(-length // ranks)
        axes.append([(start, min(step, length - start)) for start in range(0, length, step)])
    return [(tuple(o for o, _ in cell), tuple(s for _, s in cell)) for cell in itertools.product(*axes)]


sizes = some.tuples(some.integers(1, 5), some.integers(1, 5))
offsets = some.tuples(some.integers(0, 6), some.integers(0, 6))


@given(
    offsets, offsets, sizes, some.booleans(), offsets, some.tuples(some.integers(0, 7), some.integers(0, 7))
)
@settings(max_examples=300)
def test_intersect_agrees_with_looking_at_every_element(
    tensor_offset, canonical_offset, shape, transposed, slice_offset, slice_shape
) -> None:
    view = View("t", tensor_offset, "c", canonical_offset, shape, transposed)
    expected = {}
    for row, column in numpy.ndindex(shape):
        across, down = (column, row) if transposed else (row, column)
        here = (
            canonical_offset[0] + across - slice_offset[0],
            canonical_offset[1] + down - slice_offset[1],
        )
        if 0 <= here[0] < slice_shape[0] and 0 <= here[1] < slice_shape[1]:
            expected[tensor_offset[0] + row, tensor_offset[1] + column] = here
    overlap = intersect(view, slice_offset, slice_shape)
    found = {}
    if overlap is not None:
        for row, column in numpy.ndindex(overlap.tensor_shape):
            across, down = (column, row) if transposed else (row, column)
            there = (overlap.tensor_offset[0] + row, overlap.tensor_offset[1] + column)
            found[there] = (overlap.slice_offset[0] + across, overlap.slice_offset[1] + down)
        expected_shape = overlap.tensor_shape[::-1] if transposed else overlap.tensor_shape
        assert overlap.slice_shape == expected_shape
    assert found == expected
