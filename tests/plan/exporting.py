"""Questions that exports are tried on: every axis and policy of a layout, every family, and odd recipes."""

from __future__ import annotations

from typing import Any

from shoal.facts.cluster import notation
from shoal.facts.config import Lora, TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import presets
from shoal.facts.recipe import Recipe
from shoal.plan.export.torchtitan import flavor_of
from shoal.predict.workload import Workload

# Model, cluster, layout, and how the recipe differs from bf16 with 512 sequences of 4096 tokens.
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama3-8b", "8xH100", "dp=8", {}),
    ("llama3-8b", "8xH100", "fsdp=8", {}),
    ("llama3-8b", "8xH100", "fsdp=8,zero=1", {"schedule": "constant", "warmup": 0}),
    (
        "llama3-8b",
        "8xH100",
        "fsdp=8,zero=2,offload=optimizer:0.5@nvme",
        {"schedule": "linear", "lr_min": 0.1},
    ),
    ("llama3-70b", "64xH100", "dp=8,fsdp=8,recompute=full,micro=1", {"schedule": "wsd", "lr_min": 0.1}),
    ("llama3-70b", "64xH100", "fsdp=8,tp=8,recompute=selective,micro=1", {"lr_min": 0.1}),
    ("llama3-70b", "64xH100", "dp=8,tp=8", {"precision": "fp16"}),
    ("llama3-8b", "8xA100-80GB", "dp=8", {}),
    ("llama3-8b", "64xA100-80GB", "fsdp=8,cp=8,micro=1,cp_kind=ulysses", {"optimizer": "sgd"}),
    ("llama3-8b", "64xH100", "fsdp=8,cp=8,micro=1", {"states": "bf16"}),
    ("llama3-8b", "64xH100", "dp=2,fsdp=4,cp=8,micro=1", {"precision": "fp8"}),
    ("llama3-405b", "16384xH100", "dp=128,tp=8,pp=16,micro=1", {"batch": 2048}),
    (
        "llama3-405b",
        "16384xH100",
        "dp=8,fsdp=16,zero=1,tp=8,pp=16,schedule=interleaved,chunks=3,micro=1",
        {"batch": 2048},
    ),
    ("llama3-8b", "8xH100", "fsdp=2,pp=4,schedule=zb,micro=1", {}),
    ("llama3-8b", "8xH100", "fsdp=2,pp=4,schedule=zbv,micro=1", {}),
    ("mixtral-8x7b", "64xH100", "fsdp=64,ep=8,micro=1", {}),
    ("deepseek-v3", "2048xH100", "fsdp=128,pp=16,ep=64,micro=1,recompute=full", {"batch": 2048}),
    ("qwen3-235b-a22b", "512xH200", "fsdp=64,tp=8,sp=0,ep=8,micro=1", {}),
    (
        "gpt3-175b",
        "8xH100",
        "fsdp=8,micro=1,recompute=full,offload=optimizer+params@nvme+activations",
        {"seq": 2048},
    ),
    (
        "gpt-neox-20b",
        "16xA100-80GB",
        "fsdp=16,unit=2,micro=1",
        {"seq": 2048, "precision": "fp32", "clip": 0.0},
    ),
    ("mistral-7b", "4xcpu", "dp=4", {"precision": "fp32"}),
    ("tiny", "2xcpu", "fsdp=2", {"precision": "fp64", "seq": 128, "states": "int8", "reduce": "bf16"}),
    ("tiny", "1xcpu", "dp=1", {"precision": "fp32", "seq": 128, "dropout": 0.1}),
]


def ask(
    layout: str,
    model: str = "llama3-8b",
    on: str | None = None,
    tune: TuneSection | None = None,
    lora: Lora | None = None,
    **recipe: Any,
) -> Workload:
    """A question about a layout; the cluster is as many H100 as it needs, unless it is named."""
    placed = Layout.parse(layout)
    values = {"seq": 4096, "batch": 512, "precision": "bf16", "lr": 3e-4, **recipe}
    cluster = notation.find(on or f"{placed.world}xH100")
    return Workload(
        presets.find(model), cluster, Recipe(**values), placed, tune=tune or TuneSection(), lora=lora
    )


def questions() -> list[Workload]:
    return [ask(layout, model, on, **recipe) for model, on, layout, recipe in CASES]


def written_by(stack: str, workload: Workload) -> bool:
    """Whether a stack has a model of this shape; torchtitan has some by name, and no others."""
    return stack != "torchtitan" or flavor_of(workload.model) is not None
