"""The table of tensors against transformers: counts of the public models, names and shapes of small ones."""

import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from shoal.facts.model import Model
from shoal.facts.model.huggingface import read_config, write_config
from shoal.facts.model.parameters import CORRECTION, active_parameter_count, parameter_count, parameters
from shoal.facts.model.presets import PRESETS

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": 40, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 16}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
QWEN3_MOE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "head_dim": 8}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "llama, every option": (
        "llama",
        GROUPED | {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", GROUPED),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 8}),
    "qwen3, biased": ("qwen3", GROUPED | {"head_dim": 8, "attention_bias": True}),
    "gemma2": ("gemma2", GROUPED | {"head_dim": 8}),
    "gemma2, biased, untied": (
        "gemma2",
        GROUPED | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma3_text": ("gemma3_text", GROUPED | {"head_dim": 8}),
    "gpt2": ("gpt2", GPT2),
    "gpt2, untied": ("gpt2", GPT2 | {"tie_word_embeddings": False, "n_inner": 50}),
    "gpt_neox": ("gpt_neox", SIZES | {"rotary_pct": 0.5}),
    "gpt_neox, unbiased": ("gpt_neox", SIZES | {"attention_bias": False, "rotary_pct": 1.0}),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE | {"mlp_only_layers": [1]}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3, every option": (
        "deepseek_v3",
        DEEPSEEK | {"q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2},
    ),
}
LAST_NORM = ("model.norm", "transformer.ln_f", "gpt_neox.final_layer_norm")


def network_of(config: dict[str, Any]) -> torch.nn.Module:
    fields = dict(config)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))


@pytest.mark.parametrize("model", PRESETS.values(), ids=PRESETS)
def test_the_public_models_have_as_many_parameters_as_in_transformers(model: Model) -> None:
    with torch.device("meta"):
        network = network_of(write_config(model))
    assert parameter_count(model) == sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("case", SMALL)
def test_names_and_shapes_are_those_of_the_files_that_transformers_writes(case: str, tmp_path: Path) -> None:
    """The files, not the state_dict: transformers 5 stacks experts and renames NeoX's head in memory only."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    family, fields = SMALL[case]
    config = {"model_type": family, "bos_token_id": 1, "eos_token_id": 2} | fields
    network_of(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    ours = {parameter.name: parameter.shape for parameter in parameters(read_config(config, "small"))}
    assert ours == written
    # Not trained by gradients, and yet a part of the model.
    assert any(name.endswith(CORRECTION) for name in written) == (family == "deepseek_v3")


@pytest.mark.parametrize("case", SMALL)
def test_the_count_is_the_sum_of_the_table(case: str) -> None:
    family, fields = SMALL[case]
    model = read_config({"model_type": family} | fields, "small")
    assert parameter_count(model) == sum(one.size for one in parameters(model) if one.trained)


@pytest.mark.parametrize("case", SMALL)
def test_what_decays_and_where_tensors_belong(case: str) -> None:
    family, fields = SMALL[case]
    model = read_config({"model_type": family} | fields, "small")
    for parameter in parameters(model):
        assert parameter.decayed == (not parameter.name.endswith("bias") and parameter.kind != "norm")
        assert parameter.trained == (not parameter.name.endswith(CORRECTION))
        outside = parameter.kind in ("embedding", "position", "head") or parameter.name.startswith(LAST_NORM)
        assert (parameter.layer is None) == outside
        if parameter.layer is not None:
            assert f".{parameter.layer}." in parameter.name


def test_active_parameters_are_the_total_less_the_experts_a_token_misses() -> None:
    model = read_config({"model_type": "deepseek_v3"} | DEEPSEEK, "small")
    assert model.experts is not None
    kinds: Counter[str] = Counter()
    for parameter in parameters(model):
        kinds[parameter.kind] += parameter.size
    missed = kinds["expert"] * (model.experts.count - model.experts.active) // model.experts.count
    assert active_parameter_count(model) == parameter_count(model) - missed
    assert kinds["router"] == 2 * 8 * (24 + 1)  # with a correction for each expert


def test_counting_the_largest_takes_no_time() -> None:
    seconds = []
    for _ in range(3):  # the best of three: the machine may be busy
        start = time.perf_counter()
        parameter_count(PRESETS["deepseek-v3"])
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05
