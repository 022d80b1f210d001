"""Exported, read back, exported again: what a stack's files can say comes back, for all seven of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.plan.exporting import ask, questions, written_by

from shoal.facts.config import Config, TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import presets
from shoal.plan.export import STACKS, export
from shoal.plan.importers import Imported, read_foreign
from shoal.predict.workload import Workload

# Accelerate's recipe is in its command line, which people keep in a script.
FILES = {
    "deepspeed": "ds_config.json",
    "accelerate": "launch.sh",
    "megatron": "megatron.sh",
    "torchtitan": "torchtitan_config.py",
    "megatron-bridge": "bridge_run.py",
    "nemo": "nemo_run.py",
    "sagemaker": "sagemaker_job.py",
}
# Parts of a recipe that a stack's files have no word for, or that follow from others there.
LOST: dict[str, set[str]] = {
    "deepspeed": {"seq", "seed"},
    "accelerate": {"seq", "reduce"},
    "megatron": set(),
    "torchtitan": set(),
    "megatron-bridge": set(),
    "nemo": {"seed"},
    "sagemaker": {"seq", "reduce"},
}


def there_and_back(workload: Workload, stack: str, folder: Path) -> Imported:
    exported = export(stack, workload)
    for name, text in exported.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if stack == "accelerate":
        (folder / "launch.sh").write_text(f"#!/bin/bash\n{exported.command}\n", encoding="utf-8")
    return read_foreign(folder / FILES[stack])


# What each of them can say to the letter.
EXACT: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "deepspeed": [
        ("llama3-8b", "dp=8,micro=2", {}),
        ("llama3-8b", "fsdp=8,zero=2,micro=2,offload=optimizer", {"schedule": "linear"}),
        ("llama3-8b", "fsdp=4,zero=2,tp=2,sp=0,micro=2,recompute=full", {"lr_min": 0.1}),
        ("mixtral-8x7b", "fsdp=8,ep=4,micro=1", {"states": "bf16", "reduce": "bf16"}),
    ],
    "accelerate": [
        ("llama3-8b", "dp=8,micro=2", {}),
        ("llama3-8b", "dp=2,fsdp=4,micro=2,recompute=full", {"schedule": "wsd", "decay": 30, "lr_min": 0.1}),
        ("llama3-8b", "fsdp=4,tp=2,micro=4", {"schedule": "constant", "clip": 0.5}),
        ("llama3-8b", "fsdp=2,cp=4,micro=2", {"precision": "fp32"}),
        ("llama3-8b", "fsdp=8,zero=1,micro=4", {"schedule": "linear"}),
    ],
    "megatron": [
        ("llama3-8b", "dp=8,micro=2", {"optimizer": "sgd", "momentum": 0.5}),
        (
            "llama3-8b",
            "dp=2,fsdp=4,micro=2,recompute=selective",
            {"schedule": "wsd", "decay": 30, "lr_min": 0.1},
        ),
        ("qwen2-7b", "fsdp=2,zero=1,tp=2,pp=2,micro=2,offload=optimizer:0.5", {"precision": "fp16"}),
        ("llama2-7b", "fsdp=2,zero=1,pp=4,schedule=interleaved,micro=1", {"dropout": 0.1, "reduce": "bf16"}),
        ("mixtral-8x7b", "fsdp=8,ep=4,micro=1", {"router_aux": 0.01}),
        ("gpt2", "fsdp=4,tp=2,sp=0,micro=1", {"seq": 1024, "schedule": "constant"}),
        ("llama3-8b", "fsdp=2,cp=4,cp_kind=ulysses,micro=1", {"precision": "fp8"}),
    ],
    "torchtitan": [
        ("llama3-8b", "dp=8,micro=2", {}),
        ("llama3-70b", "dp=2,fsdp=2,tp=2,micro=2,recompute=full", {"schedule": "wsd", "decay": 30}),
        ("qwen3-8b", "fsdp=4,cp=2,micro=1,recompute=selective", {"states": "bf16", "lr_min": 0.1}),
        ("llama3-8b", "fsdp=2,pp=4,schedule=interleaved,micro=2", {"schedule": "linear"}),
        ("qwen3-30b-a3b", "fsdp=8,ep=8,micro=2", {"schedule": "constant"}),
    ],
    "megatron-bridge": [
        ("llama3-8b", "dp=8,micro=2", {"optimizer": "sgd", "momentum": 0.5}),
        (
            "llama3.2-1b",
            "dp=2,fsdp=4,micro=2,recompute=full",
            {"schedule": "wsd", "decay": 30, "lr_min": 0.1},
        ),
        ("qwen3-8b", "fsdp=2,zero=1,tp=2,pp=2,micro=1", {"schedule": "constant"}),
        ("llama2-7b", "fsdp=2,zero=1,pp=4,schedule=interleaved,micro=1", {"dropout": 0.1}),
        ("mixtral-8x7b", "fsdp=8,ep=4,micro=1", {"precision": "fp8", "router_aux": 0.01}),
    ],
    "nemo": [
        ("llama3-8b", "dp=8,micro=2", {}),
        ("llama3.2-1b", "dp=2,fsdp=4,micro=2,recompute=full", {"schedule": "linear", "lr_min": 0.1}),
        ("qwen3-8b", "fsdp=2,zero=1,tp=2,pp=2,micro=1", {"schedule": "constant"}),
        ("mixtral-8x7b", "fsdp=8,ep=4,micro=1", {"precision": "fp8", "router_aux": 0.01}),
    ],
    "sagemaker": [
        ("llama3-8b", "dp=8,micro=2", {}),
        ("llama3-8b", "dp=2,fsdp=4,micro=2,recompute=full,offload=activations", {"lr_min": 0.1}),
        ("llama3-8b", "fsdp=2,tp=2,cp=2,micro=2", {"schedule": "wsd", "decay": 30}),
        ("mixtral-8x7b", "fsdp=8,ep=4,micro=1", {"precision": "fp16"}),
    ],
}


@pytest.mark.parametrize(
    ("stack", "model", "layout", "recipe"),
    [(stack, *case) for stack, cases in EXACT.items() for case in cases],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_layout_recipe_and_model_come_back(
    tmp_path: Path, stack: str, model: str, layout: str, recipe: dict[str, Any]
) -> None:
    given = {"batch": 64, "warmup": 15, "seed": 7, "weight_decay": 0.05, "beta2": 0.9, "steps": 300, **recipe}
    if given.get("optimizer") == "sgd":
        del given["beta2"]
    workload = ask(layout, model, **given)
    found = there_and_back(workload, stack, tmp_path)
    config = Config.model_validate(found.tables)
    assert config.layout == layout
    lost = LOST[stack]
    assert config.recipe.model_dump(exclude=lost) == workload.recipe.model_dump(exclude=lost)
    if stack in ("megatron", "megatron-bridge", "nemo", "torchtitan"):
        assert found.tables["model"] == {"preset": model}
    if stack == "sagemaker":
        assert found.tables["cluster"] == {"on": "8xH100"}
    assert not [note for note in found.notes if "no counterpart" in note]


# What cannot be said is left out on the way there, and the export says so.
DIFFERS = {
    ("deepspeed", "dp=8,fsdp=8,micro=1,recompute=full"),  # replicas of a sharded copy
    ("deepspeed", "dp=2,fsdp=4,cp=8,micro=1"),
    ("megatron", "fsdp=2"),  # fp64
}


@pytest.mark.parametrize(
    ("workload", "stack"),
    [(one, stack) for one in questions() for stack in STACKS if written_by(stack, one)],
    ids=lambda one: one if isinstance(one, str) else f"{one.model.name} {one.layout}",
)
def test_read_back_and_exported_again_the_files_are_the_same(
    tmp_path: Path, workload: Workload, stack: str
) -> None:
    found = there_and_back(workload, stack, tmp_path)
    assert not [note for note in found.notes if "no counterpart" in note]
    config = Config.model_validate(found.tables)
    preset = found.tables.get("model", {}).get("preset")
    model = found.shape or (presets.find(preset) if preset else workload.model)
    assert all(
        getattr(model, key) == getattr(workload.model, key)
        for key in ("layers", "hidden", "vocab", "experts")
    )
    recipe = config.recipe
    if "seq" in LOST[stack]:
        recipe = recipe.model_copy(update={"seq": workload.recipe.seq})
    again = replace(
        workload,
        model=model.model_copy(update={"name": workload.model.name}),
        recipe=recipe,
        layout=Layout.parse(config.layout),
        tune=config.tune,
    )
    first, second = export(stack, workload).files, export(stack, again).files
    same = {name: plain(text) for name, text in first.items()} == {
        name: plain(text) for name, text in second.items()
    }
    assert same == ((stack, str(workload.layout)) not in DIFFERS)


def plain(text: str) -> list[str]:
    """Without the lines that name the layout for a person."""
    return [line for line in text.splitlines() if not re.match(r'(#|"""|description = )', line)]


@pytest.mark.parametrize("stack", ["megatron", "megatron-bridge", "nemo"])
@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_known_again(tmp_path: Path, stack: str, name: str) -> None:
    model = presets.PRESETS[name]
    found = there_and_back(ask("fsdp=8,micro=1", name, batch=8, seq=128), stack, tmp_path)
    if not model.parallel_residual and not model.output_norms:
        assert found.tables["model"] == {"preset": name} and found.shape is None
        return
    if found.shape is None:  # windows by turns, which no model without those norms has
        assert model.output_norms and "name one with --model" in " ".join(found.notes)
        return
    # Megatron's core computes attention and MLP one after the other, and has no norms behind them: the nearest.
    assert found.shape.layers == model.layers
    assert not found.shape.parallel_residual and not found.shape.output_norms
    assert found.shape.family == "gpt_neox" or model.output_norms


def test_buckets_come_back(tmp_path: Path) -> None:
    tune = TuneSection(bucket_mb=50.0)
    for stack in ("deepspeed", "megatron", "nemo"):
        found = there_and_back(ask("fsdp=8,micro=2", tune=tune), stack, tmp_path)
        assert found.tables["tune"]["bucket_mb"] == 50.0
