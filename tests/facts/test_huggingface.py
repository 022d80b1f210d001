"""config.json: what transformers makes of a file is what we make of it, and what we cannot do is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from shoal.facts.model import Model, RopeScaling
from shoal.facts.model.huggingface import read_config, write_config
from shoal.facts.model.presets import PRESETS
from shoal.facts.problem import BadInput

# Nothing but the sizes that we insist on: everything else is a default of transformers.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 1024,  # heads of 8: NeoX rotates a quarter of each, which must be even
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 128,
}
GPT2_SIZES = {"vocab_size": 64, "n_embd": 256, "n_layer": 30, "n_head": 128}
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_neox",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
)


def config_of(family: str, **others: Any) -> dict[str, Any]:
    return {"model_type": family} | (GPT2_SIZES if family == "gpt2" else SIZES) | others


def as_transformers_reads(config: dict[str, Any]) -> Model:
    """Our reading of the complete config, defaults and all, that transformers 5 makes of this one."""
    given = json.loads(json.dumps(config))  # transformers changes nested objects in place
    complete = AutoConfig.for_model(given.pop("model_type"), **given).to_dict()
    return read_config(complete, "m")


def problems_of(config: Any) -> list[str]:
    with pytest.raises(BadInput) as caught:
        read_config(config, "m")
    return [str(problem) for problem in caught.value.problems]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16}
SLIDES = ["full_attention", "sliding_attention"] * 15
VARIANTS = [
    *(config_of(family) for family in FAMILIES),
    config_of("llama", rope_theta=5e5, rope_scaling=LLAMA3),
    config_of("llama", rope_theta=5e5, rope_scaling={**YARN, "mscale": 0.5, "mscale_all_dim": 0.7}),
    config_of("llama", rope_scaling={"type": "linear", "factor": 2}),
    config_of("llama", rope_scaling={"type": "dynamic", "factor": 2.0}),
    config_of("llama", rope_parameters={"rope_type": "default", "rope_theta": 7e4}),
    config_of("llama", rope_scaling={"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}),
    config_of("llama", attention_bias=True, mlp_bias=True, num_key_value_heads=8, head_dim=16),
    config_of("llama", tie_word_embeddings=True, hidden_act="gelu", rms_norm_eps=1e-4, initializer_range=0.1),
    config_of("mistral", sliding_window=None, num_key_value_heads=16, head_dim=32),
    config_of("qwen2", use_sliding_window=True, sliding_window=100, max_window_layers=10),
    config_of("qwen2", use_sliding_window=True, max_window_layers=40),
    config_of("qwen3", use_sliding_window=True, sliding_window=100, layer_types=SLIDES, head_dim=64),
    config_of("qwen3", use_sliding_window=False, sliding_window=100, max_window_layers=10),
    config_of("qwen3", attention_bias=True, rope_scaling=YARN, num_key_value_heads=2),
    config_of("gpt2", n_inner=100, n_positions=77, tie_word_embeddings=False, activation_function="relu"),
    config_of("gpt_neox", rotary_pct=0.5, rotary_emb_base=5e4, use_parallel_residual=False),
    config_of("gpt_neox", rope_parameters={"rope_theta": 5e4, "partial_rotary_factor": 1.0}),
    config_of(
        "gpt_neox", attention_bias=False, hidden_act="gelu_fast", rope_scaling={"type": "linear", "factor": 2}
    ),
    config_of("gemma2", query_pre_attn_scalar=224, head_dim=64, attn_logit_softcapping=None),
    config_of("gemma2", sliding_window=100, layer_types=SLIDES, final_logit_softcapping=None),
    config_of("gemma2", layer_types=["full_attention"] * 30, sliding_window=None, attention_bias=True),
    config_of("gemma2", tie_word_embeddings=False, rope_theta=5e4, rope_scaling=LLAMA3),
    config_of("gemma3_text", sliding_window=64, sliding_window_pattern=3, final_logit_softcapping=20.0),
    config_of("gemma3_text", rope_theta=3e5, rope_local_base_freq=2e4, query_pre_attn_scalar=168),
    config_of("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0}, num_key_value_heads=1),
    config_of(
        "gemma3_text",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    config_of("gemma3_text", layer_types=["full_attention"] * 30),
    config_of("mixtral", num_local_experts=4, sliding_window=128, tie_word_embeddings=True),
    config_of(
        "qwen3_moe", num_experts=16, norm_topk_prob=True, mlp_only_layers=[0, 3], decoder_sparse_step=2
    ),
    config_of(
        "qwen3_moe", use_sliding_window=True, sliding_window=64, head_dim=128, moe_intermediate_size=40
    ),
    config_of(
        "deepseek_v3", q_lora_rank=None, first_k_dense_replace=1, n_shared_experts=2, attention_bias=True
    ),
    config_of(
        "deepseek_v3", n_group=1, topk_group=1, n_routed_experts=16, norm_topk_prob=False, rope_scaling=YARN
    ),
]


@pytest.mark.parametrize("config", VARIANTS, ids=lambda config: str(config["model_type"]))
def test_a_file_means_what_transformers_takes_it_to_mean(config: dict[str, Any]) -> None:
    assert read_config(config, "m") == as_transformers_reads(config)


@pytest.mark.parametrize("config", VARIANTS, ids=lambda config: str(config["model_type"]))
def test_what_we_write_is_read_back_by_us_and_by_transformers(config: dict[str, Any]) -> None:
    model = read_config(config, "m")
    assert as_transformers_reads(write_config(model)) == model


@pytest.mark.parametrize("model", PRESETS.values(), ids=PRESETS)
def test_presets_survive_writing(model: Model) -> None:
    written = json.loads(json.dumps(write_config(model)))
    assert read_config(written, model.name) == model
    assert as_transformers_reads(written).model_copy(update={"name": model.name}) == model


def test_the_defaults_that_are_easy_to_get_wrong() -> None:
    assert read_config(config_of("mistral")).window == 4096
    assert read_config(config_of("mistral", sliding_window=None)).window is None
    assert read_config(config_of("mistral")).kv_heads == 8
    assert read_config(config_of("llama")).kv_heads == SIZES["num_attention_heads"]
    assert read_config(config_of("qwen3")).head_dim == 128
    assert read_config(config_of("mixtral")).rope_theta == 1e6
    assert read_config(config_of("gpt2")).tied and not read_config(config_of("llama")).tied
    assert read_config(config_of("gpt2")).ffn == 4 * GPT2_SIZES["n_embd"]
    assert read_config(config_of("gpt_neox")).rope_fraction == 0.25
    neox = read_config(config_of("gpt_neox"))
    assert neox.parallel_residual and neox.qkv_bias and neox.out_bias and neox.mlp_bias
    qwen2 = read_config(config_of("qwen2"))
    assert qwen2.qkv_bias and not qwen2.out_bias and qwen2.window is None


def test_windows_by_layer() -> None:
    model = read_config(
        config_of("qwen2", use_sliding_window=True, sliding_window=100, max_window_layers=28), "m"
    )
    assert (model.window, model.window_layers) == (100, (28, 29))
    assert model.layer_window(27) is None and model.layer_window(28) == 100


def test_dense_layers_of_qwen3_moe() -> None:
    model = read_config(
        config_of("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[1], decoder_sparse_step=2)
    )
    assert model.experts is not None and model.experts.dense_layers == (0, 1, 2, 4)


def test_deepseek_v3_as_on_the_hub() -> None:
    published = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8"},
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    }
    assert read_config(published, "deepseek-v3") == PRESETS["deepseek-v3"]


REFUSED = [
    ({"vocab_size": 8}, "model_type is missing"),
    (config_of("llama") | {"model_type": "lama"}, "did you mean 'llama'?"),
    (config_of("llama") | {"model_type": ["llama"]}, "not supported"),
    (config_of("llama") | {"model_type": "gpt_neo"}, "known: llama"),
    ({"zero_optimization": {"stage": 3}}, "is a DeepSpeed config, not the config.json of a model"),
    (
        config_of("llama", rope_scaling={"rope_type": "longrope", "factor": 2}),
        "type 'longrope' is not supported",
    ),
    (config_of("llama", rope_scaling={"rope_type": "llama3", "factor": 8}), "low_freq_factor is missing"),
    (config_of("llama", rope_scaling={"type": "linear"}), "factor is missing"),
    (config_of("llama", rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2}), "keep one"),
    (
        config_of("llama", rope_scaling=YARN, rope_parameters=LLAMA3),
        "rope_scaling and rope_parameters differ",
    ),
    (config_of("llama", rope_theta=1e4, rope_parameters={"rope_theta": 5e5}), "given twice"),
    (config_of("llama", rope_scaling={**YARN, "finetuned": True}), "does not take 'finetuned'"),
    (config_of("qwen3", rope_parameters={"full_attention": {"rope_theta": 1e4}}), "'full_attention'"),
    (config_of("llama", rope_scaling=[1]), "it must be an object or null"),
    (config_of("llama", rope_scaling={"type": "linear", "factor": float("nan")}), "factor is nan"),
    (config_of("llama", rope_theta=10**400), "rope_theta is 1000"),
    (config_of("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
    (config_of("llama", hidden_act="relu2"), "hidden_act 'relu2' is not supported"),
    (config_of("llama", sliding_window=8), "sliding_window = 8 is not supported"),
    (config_of("llama", architectures=["LlamaForCausalLMEagle3"]), "LlamaForCausalLMEagle3"),
    (config_of("llama", num_key_value_heads=3), "128 heads cannot share 3"),
    (config_of("llama", hidden_size=1000), "128 heads do not divide"),
    (config_of("llama", num_hidden_layers="30"), "num_hidden_layers is '30'"),
    (config_of("llama", num_hidden_layers=True), "num_hidden_layers is True"),
    (config_of("llama", tie_word_embeddings="no"), "tie_word_embeddings is 'no'"),
    (config_of("mistral", attention_bias=True), "attention_bias = True is not supported"),
    (config_of("mistral", layer_types=SLIDES), "layer_types contradicts"),
    (config_of("qwen3", layer_types=SLIDES), "layer_types contradicts"),
    (config_of("qwen3", use_sliding_window=True, layer_types=["linear_attention"] * 30), "layer_types"),
    (config_of("qwen3", use_sliding_window=True, layer_types=SLIDES[:4]), "one for each layer"),
    (config_of("qwen3_moe", use_sliding_window=True, max_window_layers=3), "max_window_layers is 3"),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "reads images too"),
    (config_of("gemma2", sliding_window=None), "sliding_window is null"),
    (config_of("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention"),
    (config_of("gemma2", attn_logit_softcapping=-1), "attn_logit_softcapping is -1"),
    (config_of("gemma3_text", attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0 is not supported"),
    (
        config_of("gemma3_text", rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2}}),
        "only a default type",
    ),
    (config_of("gemma3_text", rope_parameters={"sliding_attention": [1]}), "it must be an object or null"),
    (config_of("qwen3_moe", mlp_only_layers=[30]), "mlp_only_layers names 30"),
    (config_of("qwen3_moe", num_experts=4), "there are only 4 experts"),
    (config_of("qwen3_moe", num_experts=16, num_local_experts=32), "keep one"),
    (config_of("mixtral", router_jitter_noise=0.1), "router_jitter_noise"),
    (config_of("gpt_neox", rotary_pct=0.4), "would rotate"),
    (config_of("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx = True"),
    (config_of("gpt2", reorder_and_upcast_attn=True), "reorder_and_upcast_attn = True"),
    (config_of("gpt2", scale_attn_weights=False), "scale_attn_weights = False"),
    (config_of("gpt2", add_cross_attention=True), "add_cross_attention = True"),
    ({"model_type": "gpt2", "vocab_size": 8, "n_embd": 8, "n_head": 2}, "n_layer is missing"),
    (config_of("gpt2", hidden_size=512), "n_embd is 256 and hidden_size is 512"),
    (config_of("deepseek_v3", scoring_func="softmax"), "scoring_func = 'softmax'"),
    (config_of("deepseek_v3", moe_layer_freq=2), "moe_layer_freq = 2"),
    (config_of("deepseek_v3", rope_interleave=False), "rope_interleave = False"),
    (config_of("deepseek_v3", num_key_value_heads=64), "as many as heads"),
    (config_of("deepseek_v3", n_shared_experts=None), "n_shared_experts is None"),
    (config_of("deepseek_v3", topk_group=9), "cannot come from 9 of 8 groups"),
    (config_of("deepseek_v3", head_dim=128), "head_dim is 128"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_we_do_not_support_is_refused(config: dict[str, Any], message: str) -> None:
    told = problems_of(config)
    assert message in "\n".join(told)
    assert all("fix:" in problem for problem in told)


def test_all_problems_are_told_at_once() -> None:
    told = problems_of(
        {"model_type": "llama", "hidden_act": "magic", "rope_scaling": {"type": "su"}, "vocab_size": 0}
    )
    text = "\n".join(told)
    for word in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "magic", "su"):
        assert word in text
    assert len(told) == len(set(told)) == 7


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe\xfa", b"[" * 100_000])
def test_a_broken_file_is_bad_input(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"config\.json"):
        read_config(path)


def test_a_missing_file_and_a_directory_are_bad_input(tmp_path: Path) -> None:
    for path in (tmp_path / "config.json", tmp_path):
        with pytest.raises(BadInput, match="cannot read"):
            read_config(path)


@pytest.mark.parametrize(
    ("preset", "change"),
    [
        ("tiny", {"qk_norm": True}),
        ("tiny", {"out_bias": True}),
        ("tiny", {"rope_scaling": RopeScaling(kind="dynamic", factor=2, original_positions=5)}),
        ("gpt2", {"qkv_bias": False}),
        ("mistral-7b", {"window_layers": (1,)}),
        ("mixtral-8x7b", {"experts": None}),
    ],
)
def test_a_shape_that_a_family_cannot_say_is_not_written(preset: str, change: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"cannot say {next(iter(change))}"):
        write_config(PRESETS[preset].model_copy(update=change))
