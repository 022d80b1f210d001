"""Read and write PEFT's adapter files: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT's names are those of the model's own modules after ``base_model.model.``. A checkpoint's adapters have the same
names, for families whose projections are separate modules. If a family fuses projections, PEFT has one adapter for all
of them and Shoal one for each: such adapters are not exchanged, but merged weights are.

In an MoE model, PEFT interprets the names of MLP projections as the routed experts', which ``transformers`` stacks.
Adapters of dense layers and shared experts are then listed under ``target_parameters``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.facts.input.untrusted_files import read_json
from shoal.facts.model import Adapters, Model
from shoal.facts.model.parameters import UNFUSED, adapter_parameters
from shoal.facts.model.tensor_split import box_slices
from shoal.facts.problem import BadInput, Problem
from shoal.models.initial import Slice
from shoal.train.checkpoint.read import Checkpoint

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Targets that PEFT interprets as the routed experts'.
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
FLOATS = ("F64", "F32", "BF16", "F16")
# Other PEFT options, with the value that means they are unused.
UNKNOWN: dict[str, Any] = {
    "use_rslora": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "trainable_token_indices": None,
}


def check_exchanged(model: Model) -> None:
    if model.family not in UNFUSED:
        raise BadInput(
            f"{model.name}: PEFT's adapters are not exchanged for the family {model.family}, which fuses projections",
            f"--to hf: merged weights; PEFT's files are for {', '.join(UNFUSED)}",
        )
    if model.adapters is not None and model.adapters.kind == "dora" and _as_parameters(model):
        raise BadInput(
            f"{model.name}: PEFT has no DoRA beside {_as_parameters(model)[0]} of a model with experts",
            "--to hf: merged weights",
        )


def _as_parameters(model: Model) -> list[str]:
    """Targets that PEFT finds only by the names of their weights."""
    assert model.adapters is not None
    return [one for one in model.adapters.targets if model.experts is not None and one in OF_EXPERTS]


class PeftFiles:
    """An adapter's tensors. Created once per process; everything is checked here."""

    def __init__(self, directory: Path, model: Model) -> None:
        """``model``: with the adapters that will be trained."""
        check_exchanged(model)
        assert model.adapters is not None
        self.path = directory / WEIGHTS
        _check_config(directory, model.adapters, model.experts is not None)
        try:
            with safe_open(self.path, framework="pt") as file:
                names = file.keys()
                held = {name: file.get_slice(name) for name in names}
                wanted = {f"{PREFIX}{one.name}": one.shape for one in adapter_parameters(model)}
                found = {name: tuple(part.get_shape()) for name, part in held.items()}
                odd = [name for name, part in held.items() if part.get_dtype() not in FLOATS]
        except (SafetensorError, OSError) as error:
            raise BadInput(
                f"model.lora.init_from: {self.path} cannot be read: {error}", "its files"
            ) from None
        wrong = [name for name in sorted(wanted.keys() | found.keys()) if wanted.get(name) != found.get(name)]
        if wrong or odd:
            name = (wrong or odd)[0]
            raise BadInput(
                f"model.lora.init_from: {name} is {found.get(name)} in {self.path}, here {wanted.get(name)}",
                "model.lora.targets, model.lora.rank and the model as the adapter was trained with",
            )

    def fill(self, slices: list[tuple[str, Slice]]) -> None:
        with safe_open(self.path, framework="pt") as file, torch.no_grad():
            for name, part in slices:
                box = box_slices(part.offset, tuple(part.local.shape))
                part.local.copy_(file.get_slice(f"{PREFIX}{name}")[box])


def _check_config(directory: Path, adapters: Adapters, experts: bool) -> None:
    path, said = directory / CONFIG, None
    try:
        said = read_json(path)
    except (OSError, ValueError):
        said = None
    if not isinstance(said, dict) or said.get("peft_type") != "LORA":
        raise BadInput(
            f"model.lora.init_from: {path} is no LoRA adapter's config", "a directory that PEFT has saved"
        )
    problems = []
    named = said.get("target_parameters") or []
    beside = _beside(directory / WEIGHTS)
    if experts and (frozen := _frozen(beside)):
        raise BadInput(
            f"model.lora.init_from: {directory} has adapters of {frozen}, which stay frozen here",
            "an adapter of attention alone: peft.LoraConfig(target_modules="
            f"{json.dumps([one for one in adapters.targets if one not in OF_EXPERTS])}); or merge this one with "
            "merge_and_unload(), and name what save_pretrained writes in model.init_from",
        )
    plain = experts and all(str(one).removesuffix(".weight") in OF_EXPERTS for one in named)
    usual_here = UNKNOWN if plain else UNKNOWN | {"target_parameters": []}
    for key, usual in usual_here.items():
        if said.get(key, usual) not in (usual, None):
            problems.append(
                Problem(
                    f"model.lora.init_from: {path} has {key} = {said[key]!r}",
                    f"an adapter with {key} = {usual}",
                )
            )
    # A config may hold a pattern, or names that nothing in the model has: the tensors show what was found.
    found, listed = {one.rpartition(".")[2] for one in beside}, said.get("target_modules")
    if isinstance(listed, list):
        found &= {str(one).removesuffix(".weight").rpartition(".")[2] for one in (*listed, *named)}
    theirs = sorted(found)
    for key, here, there in (
        ("kind", adapters.kind, "dora" if said.get("use_dora") else "lora"),
        ("rank", adapters.rank, said.get("r")),
        ("alpha", adapters.alpha, said.get("lora_alpha")),
        ("targets", sorted(adapters.targets), theirs if beside else sorted(adapters.targets)),
    ):
        if here != there:
            problems.append(
                Problem(
                    f"model.lora.init_from: {path} has {key} {there!r}, model.lora.{key} is {here!r}",
                    f"model.lora.{key} = {json.dumps(there)}",
                )
            )
    if problems:
        raise BadInput(problems)


def _beside(path: Path) -> set[str]:
    """The modules that an adapter's tensors stand beside; none of a file that cannot be read, which its reader says."""
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name.removeprefix(PREFIX).partition(".lora_")[0] for name in names}
    except (SafetensorError, OSError):
        return set()


def _frozen(beside: set[str]) -> str:
    """What of these gets no adapters here in a model with experts: PEFT's "all-linear" finds it."""
    routed = any(".experts" in one for one in beside)
    router = any(one.endswith(".mlp.gate") for one in beside)
    return " and ".join(["routed experts"] * routed + ["routers"] * router)


def write_peft(
    into: Path, checkpoint: Checkpoint, model: Model, base: str | None, dtype: torch.dtype | None, state: str
) -> list[Tensor]:
    """Write a checkpoint's adapters as a directory that PEFT loads, all or nothing; returns the written tensors."""
    check_exchanged(model)
    assert model.adapters is not None
    tensors = {
        f"{PREFIX}{one.name}": checkpoint.tensor(state, one.name).to(dtype).contiguous()
        for one in adapter_parameters(model)
    }
    by_weight = _as_parameters(model)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.adapters.rank,
        "lora_alpha": model.adapters.alpha,
        # PEFT supports no dropout for adapters found by their weights' names, and rejects a non-zero value.
        "lora_dropout": 0.0 if by_weight else model.adapters.dropout,
        "target_modules": [one for one in model.adapters.targets if one not in by_weight],
        "target_parameters": [f"{one}.weight" for one in by_weight] or None,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": model.adapters.kind == "dora",
        **UNKNOWN,
    }
    aside = into.with_name(f".{into.name}.unfinished")
    aside.mkdir(parents=True)
    try:
        (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, aside / WEIGHTS, {"format": "pt"})
        aside.rename(into)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return list(tensors.values())
