"""The FLOP convention, against PyTorch's own counter and against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shoal.facts.model import Experts, Model
from shoal.facts.model.parameters import active_parameter_count, parameter_count
from shoal.facts.model.presets import PRESETS
from shoal.models.decoder import build
from shoal.models.initial import initialise
from shoal.predict.flops import attention_flops, flops_per_token, in_conventions, matrix_parameters

GPT: dict[str, Any] = {
    "norm": "layer",
    "gated": False,
    "kv_heads": 4,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}


def small(**changes: Any) -> Model:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
    return Model(**{"name": "small", "family": "llama", **shape, "vocab": 61, "max_positions": 64, **changes})


SHAPES = {
    "llama": small(),
    "llama tied": small(tied=True),
    "llama with wide heads": small(head_dim=24),
    "qwen3": small(family="qwen3", qk_norm=True),
    "gpt2": small(family="gpt2", positions="learned", tied=True, **GPT),
    "gpt2 untied": small(family="gpt2", positions="learned", **GPT),
    "neox": small(family="gpt_neox", parallel_residual=True, rope_fraction=0.25, **GPT),
}


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES.keys())
def test_matrix_products_are_those_that_torch_counts(model: Model) -> None:
    network = build(model, device="cpu")
    initialise(network, model, seed=0)
    batch, seq = 2, 16
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        hidden = network(tokens, torch.arange(seq).expand(batch, seq))
        loss, _ = network.lm_head(hidden, tokens)
        loss.backward()
    counted = sum(
        flops
        for operation, flops in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(operation)
    )
    assert counted == 6 * matrix_parameters(model) * batch * seq


def test_llama3_8b_by_hand() -> None:
    model = PRESETS["llama3-8b"]
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    mlp = 3 * 4096 * 14336
    weights = 32 * (attention + mlp) + 4096 * 128256
    assert matrix_parameters(model) == weights == 7_504_658_432
    # 32 heads of 128, scores and values, 2 FLOPs each, 8193/2 positions on average
    assert attention_flops(model, 0, 8192) == 2 * 2 * 32 * 128 * 8193 / 2
    assert flops_per_token(model, 8192) == 6 * weights + 3 * 32 * 2 * 4096 * 8193
    assert flops_per_token(model, 8192) == pytest.approx(51.47e9, rel=1e-3)


def test_a_tied_head_costs_as_much_as_its_own() -> None:
    assert matrix_parameters(SHAPES["llama tied"]) == matrix_parameters(SHAPES["llama"])
    assert matrix_parameters(SHAPES["gpt2"]) == matrix_parameters(SHAPES["gpt2 untied"])


def test_positions_and_embedding_are_lookups() -> None:
    longer = SHAPES["gpt2"].model_copy(update={"max_positions": 10**6})
    assert matrix_parameters(longer) == matrix_parameters(SHAPES["gpt2"])


@pytest.mark.parametrize("window", [1, 3, 15, 16, 17, 100])
def test_a_window_counts_the_pairs_that_it_lets_through(window: int) -> None:
    seq = 16
    pairs = sum(min(position + 1, window) for position in range(seq))
    model = small(window=window)
    assert attention_flops(model, 0, seq) * seq == pytest.approx(2 * 2 * 4 * 8 * pairs)


def test_layers_without_a_window_see_everything() -> None:
    model = small(window=4, window_layers=(1,))
    assert attention_flops(model, 0, 16) == attention_flops(small(), 0, 16)
    assert attention_flops(model, 1, 16) < attention_flops(model, 0, 16)


def test_of_the_experts_only_the_active_ones_count() -> None:
    sparse = small(family="mixtral", experts=Experts(count=8, active=2, ffn=40, dense_layers=(1,)))
    expert, router, mlp = 3 * 32 * 40, 8 * 32, 3 * 32 * 48
    attention = 32 * (32 + 16 + 16 + 32)
    assert matrix_parameters(sparse) == 2 * attention + 2 * expert + router + mlp + 61 * 32


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
def test_real_mixtures_count_their_active_weights(preset: str) -> None:
    model = PRESETS[preset]
    vectors = active_parameter_count(model) - model.vocab * model.hidden - matrix_parameters(model)
    # What the two counts differ in beyond the embedding are norms.
    assert 0 < vectors < 0.001 * matrix_parameters(model)


def test_latent_attention_multiplies_narrow_values() -> None:
    model = PRESETS["deepseek-v3"]
    assert attention_flops(model, 0, 4096) == 2 * 4097 / 2 * 128 * (128 + 64 + 128)


def test_rates_in_other_conventions() -> None:
    model, seq = PRESETS["llama3-8b"], 8192
    rates = in_conventions(model, seq, 400.0)
    assert rates["causal attention once"] == pytest.approx(400.0)
    # Attention in full is about twice attention counted once; 6N knows no attention and counts the embedding.
    attention = 3 * sum(attention_flops(model, layer, seq) for layer in range(model.layers))
    total = flops_per_token(model, seq)
    assert rates["full attention"] == pytest.approx(400 * (total + attention) / total, rel=1e-3)
    assert rates["6N"] == pytest.approx(400 * 6 * parameter_count(model) / total)
