"""Adapters in models with experts: no layout changes the run; traffic and memory are what is predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.predict.counted import ask
from tests.prove.test_experts import SHAPES
from tests.thinned import thinned

from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.facts.model import Experts, Latent
from shoal.facts.model.huggingface import write_config
from shoal.facts.model.presets import PRESETS
from shoal.prove.dryrun import dryrun, first_rank
from shoal.prove.parity import Prover

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Of latent attention, and of experts that every token uses.
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
SHARED = ["gate_proj", "up_proj", "down_proj"]

SMALL = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 265}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"qk_norm": True, "experts": Experts(count=4, active=2, ffn=16)},
    "mixtral": {"experts": Experts(count=4, active=2, ffn=48)},
    "deepseek_v3": {
        "kv_heads": 4,
        "head_dim": 12,
        "latent": Latent(q_rank=12, kv_rank=10, nope_dim=8, rope_dim=4, value_dim=8),
        "experts": Experts(
            count=4, active=2, ffn=16, shared=1, shared_ffn=16, dense_layers=(0,), router_bias=True,
            groups=2, active_groups=1, score="sigmoid", scale=2.5,
        ),
    },
}  # fmt: skip
# Blocks of 64 values, which no tensor rank cuts.
WIDE: dict[str, Any] = {
    "hidden": 128,
    "kv_heads": 4,
    "head_dim": 64,
    "ffn": 128,
    "latent": Latent(q_rank=64, kv_rank=64, nope_dim=32, rope_dim=32, value_dim=32),
}


@pytest.fixture(scope="session")
def shape_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    made: dict[str, str] = {}

    def make(family: str, wide: bool = False) -> str:
        key = f"{family} {wide}"
        if key not in made:
            update = SMALL | FAMILIES[family] | {"family": family, "tied": False} | (WIDE if wide else {})
            if wide:
                update["experts"] = FAMILIES[family]["experts"].model_copy(
                    update={"ffn": 128, "shared_ffn": 128}
                )
            made[key] = str(tmp_path_factory.mktemp(family) / "config.json")
            shape = PRESETS["tiny"].model_copy(update=update)
            Path(made[key]).write_text(json.dumps(write_config(shape)))
        return made[key]

    return make


def table(targets: list[str], **others: Any) -> str:
    values = {"rank": 3, "alpha": 6, "targets": targets, **others}
    written = ", ".join(f"{key}={value!r}" for key, value in values.items())
    return f"{{{written}}}".replace("'", '"')


# Family, layout, kind: experts here and elsewhere, frozen in shards and whole; adapters before them and beside them.
CASES = [
    ("deepseek_v3", "fsdp=2,tp=2,ep=2,recompute=selective", "dora"),
    ("qwen3_moe", "fsdp=4,ep=2", "lora"),
    ("deepseek_v3", "dp=2,ep=2", "dora"),
    ("mixtral", "fsdp=2,zero=1,ep=2,recompute=full", "lora"),
    ("deepseek_v3", "fsdp=2,pp=2,ep=2,schedule=zb", "lora"),
    ("qwen3_moe", "dp=2,tp=2,sp=0,ep=2", "lora"),
    ("qwen3_moe", "cp=2,ep=2", "lora"),
    ("deepseek_v3", "tp=2", "lora"),
    ("mixtral", "fsdp=2,offload=params@nvme", "lora"),
    ("qwen3_moe", "dp=2,fsdp=2,ep=4,micro=1", "dora"),
    ("deepseek_v3", "fsdp=2,ep=2,recompute=full,offload=params", "lora"),
    ("mixtral", "pp=2,recompute=full", "lora"),
]


@pytest.mark.parametrize(("family", "layout", "kind"), thinned(CASES, 6))
def test_no_layout_changes_the_run(
    make_prover: Callable[..., Prover], shape_of: Callable[..., str], family: str, layout: str, kind: str
) -> None:
    targets = [*LATENT, *SHARED] if family == "deepseek_v3" else ATTENTION
    values = {"recipe__router_aux": 0.1, "recipe__router_z": 0.01, "model__path": shape_of(family)}
    (verdict,) = (
        make_prover("fp64", model__lora=table(targets, kind=kind), **values)
        .prove([Layout.parse(layout)])
        .verdicts
    )
    assert verdict.ok, f"{verdict.reason}; {verdict.strategy}: {verdict.file}"
    assert verdict.max_loss_diff <= 1e-12 and verdict.max_grad_diff <= 1e-12


# Experts' stacks in bytes: cut by experts, by rows of each (eight ranks, four experts), by tensor ranks; in files.
PACKED = (
    "fsdp=2,tp=2,ep=2",
    "fsdp=2,zero=1,ep=2",
    "fsdp=4,ep=2",
    "fsdp=2,ep=2,offload=params@nvme",
    "fsdp=8",
    "pp=3",
)


@pytest.mark.parametrize("layout", thinned(PACKED, 3))
def test_no_layout_changes_a_run_with_dropout_on_four_bits(
    make_prover: Callable[..., Prover], shape_of: Callable[..., str], layout: str
) -> None:
    lora = table([*LATENT, *SHARED], base="nf4", dropout=0.2)
    values = {"model__path": shape_of("deepseek_v3", wide=True), "recipe__dropout": 0}
    (verdict,) = make_prover("fp64", model__lora=lora, **values).prove([Layout.parse(layout)]).verdicts
    assert verdict.ok, f"{verdict.reason}; {verdict.strategy}: {verdict.file}"
    assert verdict.max_grad_diff <= 1e-12


DEEP, EIGHT = {"layers": 4}, {"batch": 8}
# Family, layout, targets, what else: the moments that can be the fullest, and what travels.
TWINS: list[tuple[str, str, list[str], dict[str, Any]]] = [
    ("deepseek_v3", "dp=2,tp=2,ep=2,recompute=full", [*LATENT, *SHARED], {}),
    ("qwen3_moe", "dp=2,ep=2,recompute=selective", ATTENTION, {}),
    ("qwen3_moe", "fsdp=4,ep=2,micro=1", ATTENTION, EIGHT),
    ("mixtral", "tp=2,recompute=full", ATTENTION, {}),
    ("deepseek_v3", "fsdp=2,pp=2,ep=2,micro=1,schedule=zb", [*LATENT, *SHARED], EIGHT),
    ("qwen3_moe", "dp=2,tp=2,sp=0,ep=2", ["v_proj"], {"router_aux": 0.1}),
    ("deepseek_v3", "fsdp=2,ep=2,offload=params@nvme,recompute=full,micro=1", [*LATENT, *SHARED], {}),
    ("deepseek_v3", "fsdp=4,zero=1,tp=2,ep=2", SHARED, {}),
    ("deepseek_v3", "fsdp=2,tp=2,ep=2,recompute=full", ["q_b_proj"], {}),
    ("deepseek_v3", "tp=2", ["up_proj"], {"precision": "fp32"}),
    ("qwen3_moe", "dp=2,ep=2", ATTENTION, {"precision": "fp32"}),
    ("qwen3_moe", "cp=2,ep=2", ATTENTION, {}),
    ("mixtral", "dp=2,tp=2,ep=2,recompute=selective", ["o_proj"], {}),
    ("qwen3_moe", "fsdp=2,cp=2,cp_kind=ulysses,ep=2", ["o_proj"], {}),
    ("deepseek_v3", "recompute=selective,micro=2", ["o_proj"], {}),
    ("qwen3_moe", "fsdp=2,zero=2,ep=2,offload=optimizer+params,recompute=full,micro=1", ATTENTION, {}),
]


@pytest.mark.parametrize(("family", "layout", "targets", "recipe"), thinned(TWINS, 6), ids=str)
def test_memory_and_traffic_are_what_is_predicted(
    family: str, layout: str, targets: list[str], recipe: dict[str, Any]
) -> None:
    asked = ask(layout, SHAPES[family] | DEEP, **{"precision": "bf16", **recipe})
    workload = replace(asked, lora=Lora(rank=8, alpha=16, targets=targets))
    for stage in {0, workload.layout.pp - 1}:
        seen = dryrun(workload, first_rank(workload.layout, stage))
        assert seen.traffic == seen.predicted_traffic
        assert seen.differences(0) == []


FOUR_BITS = [
    ("fsdp=4,ep=2,micro=1", "lora"),
    ("dp=2,tp=2,ep=2,recompute=full", "lora"),
    ("fsdp=2,micro=1,recompute=full,offload=params", "dora"),
    ("dp=2,ep=2", "dora"),
    ("fsdp=2,ep=2,recompute=selective,offload=params@nvme", "lora"),
]


@pytest.mark.parametrize(("layout", "kind"), thinned(FOUR_BITS, 4))
def test_memory_and_traffic_of_four_bits_are_what_is_predicted(layout: str, kind: Any) -> None:
    """Projections and routed experts are packed; routers rest as the run computes."""
    shape = (
        SHAPES["deepseek_v3"]
        | DEEP
        | {"latent": Latent(q_rank=64, kv_rank=64, nope_dim=32, rope_dim=32, value_dim=32)}
    )
    lora = Lora(kind=kind, rank=8, alpha=16, targets=[*LATENT, *SHARED], base="nf4")
    seen = dryrun(replace(ask(layout, shape, precision="bf16", batch=8), lora=lora), 0)
    assert seen.traffic == seen.predicted_traffic
    held, said = seen.memory, seen.predicted
    # What corrects routers stays on the device, whatever rests away.
    assert held.params == pytest.approx(said.params, rel=1e-3, abs=512)
    assert held.peak_allocated == pytest.approx(said.peak_allocated, rel=0.015)
    assert (held.host, held.nvme) == pytest.approx((said.host, said.nvme), rel=0.01)
