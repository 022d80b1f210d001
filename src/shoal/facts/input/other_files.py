"""Recognise a file given as a config that is something else: another tool's settings, a model, a run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.facts.input.foreign_terms import meaning
from shoal.facts.problem import BadInput

Kind = Literal[
    "deepspeed", "accelerate", "megatron", "torchtitan", "nemo", "sagemaker", "arguments", "model", "settings"
]

_DEEPSPEED = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
# A switch in Hugging Face's arguments, a table in DeepSpeed's.
_PRECISIONS = ("bf16", "fp16")
_ARGUMENTS = {
    "per_device_train_batch_size",
    "num_train_epochs",
    "output_dir",
    "lr_scheduler_type",
    "save_total_limit",
}
_SAGEMAKER = {"smdistributed", "torch_distributed", "pytorchddp"}
_TORCHTITAN = {
    ("training", "local_batch_size"),
    ("training", "global_batch_size"),
    ("training", "seq_len"),
    ("parallelism", "tensor_parallel_degree"),
    ("parallelism", "data_parallel_shard_degree"),
    ("model", "flavor"),
}
_MODEL = {"model_type", "architectures", "num_hidden_layers"}

_CALLED: dict[Kind, str] = {
    "deepspeed": "a DeepSpeed config",
    "accelerate": "what accelerate config writes",
    "megatron": "Megatron's arguments",
    "torchtitan": "a torchtitan config",
    "nemo": "a NeMo script",
    "sagemaker": "a SageMaker distribution",
    "arguments": "Hugging Face's TrainingArguments",
    "model": "the config.json of a model",
    "settings": "another tool's settings",
}
_TRANSLATED = 8


def kinds_of(values: Mapping[str, Any]) -> list[Kind]:
    """The stacks that a settings table belongs to: more than one if a user combined two."""
    found: list[Kind] = []
    if "distributed_type" in values:
        found.append("accelerate")
    if values.keys() & _DEEPSPEED or any(isinstance(values.get(name), dict) for name in _PRECISIONS):
        found.append("deepspeed")
    if any(isinstance(values.get(table), dict) and key in values[table] for table, key in _TORCHTITAN):
        found.append("torchtitan")
    if any(isinstance(values.get(name), dict) for name in _SAGEMAKER):
        found.append("sagemaker")
    return found


def kind_of(values: Mapping[str, Any]) -> Kind | None:
    """The stack that a settings table belongs to; None if unclear."""
    if stacks := kinds_of(values):
        return stacks[0]
    if values.keys() & _MODEL:
        return "model"
    if values.keys() & _ARGUMENTS:
        return "arguments"
    return "settings" if any(map(meaning, _names(values))) else None


def not_a_config(path: Path, text: str) -> BadInput | None:
    """For a file that is not TOML: what it is, and what to do with it; None if unclear."""
    values = _json(text) or _top_of_yaml(text)
    kind = kind_of(values) if values else None
    return (
        BadInput(f"{path} is {_CALLED[kind]}, not a Shoal config", _advice(kind, path, values))
        if kind
        else None
    )


def is_directory(path: Path) -> BadInput:
    """For a directory: what it holds, and what to do with it."""
    quoted = shlex.quote(str(path))
    configs = sorted(file.name for file in path.glob("*.toml"))
    if (path / "config.toml").is_file() and (path / "metrics.jsonl").exists():
        what, fix = (
            "a run's directory",
            f"shoal train {shlex.quote(str(path / 'config.toml'))} --run {quoted}",
        )
    elif (path / "config.json").is_file():
        what, fix = "a model's directory", _advice("model", path, {})
    elif configs:
        what, fix = "a directory", f"name a config in it: {', '.join(configs[:_TRANSLATED])}"
    else:
        what, fix = "a directory", "a config is a TOML file; shoal init writes one"
    return BadInput(f"{path} is {what}, not a Shoal config", fix)


def not_a_model(where: str, values: Mapping[str, Any]) -> BadInput | None:
    """For a file given as a model: what it is instead, if known."""
    kind = kind_of(values)
    if kind not in ("deepspeed", "accelerate", "arguments"):
        return None
    return BadInput(
        f"{where} is {_CALLED[kind]}, not the config.json of a model", "name the model's own config.json"
    )


def explain(kind: Kind, path: Path, values: Mapping[str, Any]) -> BadInput:
    """Point to ``shoal init --from``, which reads some of them."""
    return BadInput(
        f"{path} is {_CALLED[kind]}, which shoal init --from does not read", _advice(kind, path, values)
    )


def _advice(kind: Kind, path: Path, values: Mapping[str, Any]) -> str:
    quoted = shlex.quote(str(path))
    if kind in ("deepspeed", "accelerate", "torchtitan", "sagemaker"):
        return f"shoal init my-run.toml --from {quoted} --on 8xH100 writes one that says the same"
    if kind == "model":
        return (
            f"shoal train --set model.path={quoted} trains a model of this shape; "
            f"shoal plan {quoted} --on 8xH100 --seq 4096 --batch 64 plans for it"
        )
    answers = {name: known for name in _names(values) if (known := meaning(name)) is not None}
    pairs = [
        f"{name} is {known.key or known.layout + ' of the layout'}"
        for name, known in answers.items()
        if known.key or known.layout
    ]
    begin = "shoal init my-run.toml writes a config with every key"
    return f"{begin}; {', '.join(pairs[:_TRANSLATED])}" if pairs else begin


def _names(values: Mapping[str, Any]) -> Iterable[str]:
    """Names of settings, including those one table deeper."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from map(str, value)
        else:
            yield name


def _json(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _top_of_yaml(text: str) -> dict[str, Any]:
    """Top-level names and, as tables, those indented below them: enough to identify the tool."""
    values: dict[str, Any] = {}
    table = ""
    for margin, name, rest in re.findall(r"^( *)([A-Za-z_][\w.-]*):(?: +(\S.*)?)?$", text, re.MULTILINE):
        if not margin:
            table, values[name] = name, rest
        elif table and isinstance(values[table], dict):
            values[table][name] = rest
        elif table and not values[table]:
            values[table] = {name: rest}
    return values
