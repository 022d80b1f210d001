"""A ``config.json`` with any value in any place is a model or a message, at once."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.facts.model.huggingface import read_config
from shoal.facts.model.parameters import parameter_count
from shoal.facts.problem import BadInput

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    "use_sliding_window": True,
    "sliding_window": 32,
    "max_window_layers": 2,
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    **{"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "n_inner": None, "vocab_size": 512},
    "layer_norm_epsilon": 1e-5,
}
MOE: dict[str, Any] = {
    **{key: value for key, value in DENSE.items() if "window" not in key and "types" not in key},
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    **{
        key: DENSE[key]
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    },
    "vocab_size": 512,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 16, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32},
    **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
}
CONFIGS = {"qwen3": DENSE, "gpt2": GPT2, "qwen3_moe": MOE, "deepseek_v3": DEEPSEEK}
HOSTILE: list[Any] = [
    *(0, -1, 10**9, 10**15, 10**4000, True, 0.5, 1e15, 1e308, float("inf"), float("-inf"), float("nan")),
    *(
        "",
        "8",
        "x" * 1_000_000,
        [],
        [[]],
        [10**9],
        ["x"] * 100_000,
        {},
        {"type": 10**30},
        {"rope_type": []},
        None,
    ),
]
KEYS = [(name, key) for name, config in CONFIGS.items() for key in config]


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_every_value_in_every_place(name: str, key: str) -> None:
    assert parameter_count(read_config(CONFIGS[name])) > 0
    began = time.process_time()
    for value in HOSTILE:
        try:
            model = read_config({**CONFIGS[name], key: value})
        except BadInput as refusal:
            assert len(str(refusal)) < 20_000
        else:
            assert 0 < parameter_count(model) < 10**30
    assert time.process_time() - began < 10


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.sampled_from(list(CONFIGS)),
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([*range(1, 70), 1 << 16, 1 << 24, *HOSTILE])),
        max_size=4,
    ),
)
def test_several_at_once(name: str, changes: list[tuple[int, Any]]) -> None:
    config = dict(CONFIGS[name])
    keys = list(config)
    for place, value in changes:
        config[keys[place % len(keys)]] = value
    with contextlib.suppress(BadInput):
        assert parameter_count(read_config(config)) > 0


def test_the_issue_itself(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for key, value in (("num_hidden_layers", 10**9), ("vocab_size", 10**15)):
        path.write_text(json.dumps({**DENSE, key: value}))
        with pytest.raises(BadInput, match=rf"{key} is {value}(.|\n)*at most"):
            read_config(path)
