"""Import Hugging Face's ``TrainingArguments``, from a command line or from hyperparameters."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shoal.plan.importers.reading import Reading

# Any of these means that the script uses the Trainer, whose defaults then apply to what is omitted.
SIGNS = {
    "per_device_train_batch_size",
    "learning_rate",
    "num_train_epochs",
    "max_steps",
    "lr_scheduler_type",
    "gradient_accumulation_steps",
}
_OPTIMIZERS = {"adamw": "adamw", "sgd": "sgd", "adafactor": "adafactor", "lion": "lion"}
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
_LENGTHS = ("max_seq_length", "max_length", "block_size", "model_max_length", "max_seq_len", "cutoff_len")
# What Shoal's launcher, loop and reports do their own way.
_OWN_WAY = (
    *(
        "output_dir",
        "overwrite_output_dir",
        "do_train",
        "do_eval",
        "logging_steps",
        "logging_dir",
        "run_name",
    ),
    *(
        "logging_strategy",
        "save_strategy",
        "eval_strategy",
        "evaluation_strategy",
        "save_safetensors",
        "push_to_hub",
    ),
    *(
        "ddp_find_unused_parameters",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "remove_unused_columns",
    ),
    *(
        "disable_tqdm",
        "report_to",
        "tf32",
        "local_rank",
        "per_device_eval_batch_size",
        "log_level",
        "ddp_timeout",
    ),
)


@dataclass
class TrainerArguments:
    """The arguments' contents: parts of a recipe, one rank's batch, and what belongs in other tables."""

    recipe: dict[str, Any] = field(default_factory=dict)
    micro: int | None = None
    accumulation: int | None = None
    recompute: str | None = None
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)


def uses_trainer(values: dict[str, Any]) -> bool:
    return bool(SIGNS & values.keys())


def read(values: dict[str, Any], source: str, outer: Reading) -> TrainerArguments:
    """Read the Trainer's names. Notes and problems go to the reading of the file that contains them."""
    given = {name.replace("-", "_"): value for name, value in values.items()}
    options = given.get("lr_scheduler_kwargs")
    if isinstance(options, str):
        with suppress(ValueError):  # otherwise it is reported as is, without counterpart
            given["lr_scheduler_kwargs"] = json.loads(options)
    reading = Reading(given, source, outer.problems)
    found = TrainerArguments() if not uses_trainer(given) else _read(reading)
    model = reading.word("model_name_or_path") or reading.word("model_id")
    if model is not None:
        found.tables["model"] = {"init_from": model}
    reading.skip(*_OWN_WAY)
    outer.notes += [*reading.notes, *reading.left()]
    return found


def _read(reading: Reading) -> TrainerArguments:
    recipe = {**_optimizer(reading), **_schedule(reading), **_length(reading)}
    if (seed := reading.count("seed", absent=42)) is not None:
        recipe["seed"] = seed
    for precision in ("bf16", "fp16"):
        if reading.flag(precision):
            recipe["precision"] = precision
    lengths = [length for name in _LENGTHS if (length := reading.count(name))]
    if lengths:
        recipe["seq"] = lengths[0]
    found = TrainerArguments(recipe)
    found.micro = reading.count("per_device_train_batch_size", absent=8)
    found.accumulation = reading.count("gradient_accumulation_steps", absent=1)
    found.recompute = "full" if reading.flag("gradient_checkpointing") else None
    if (every := reading.count("save_steps")) is not None:
        found.tables["checkpoint"] = {"every": every}
    if (keep := reading.count("save_total_limit")) is not None and keep:
        found.tables.setdefault("checkpoint", {})["keep"] = keep
    if (every := reading.count("eval_steps")) is not None:
        found.tables["evaluate"] = {"every": every}
    if reading.flag("torch_compile"):
        found.tables["compile"] = {"enabled": True}
    return found


def _optimizer(reading: Reading) -> dict[str, Any]:
    name = reading.word("optim") or "adamw_torch"
    kind = _OPTIMIZERS.get(name.partition("_")[0].lower())
    if kind is None:
        reading.note(f"optim {name}: no counterpart; nearest: adamw")
    recipe: dict[str, Any] = {"optimizer": kind or "adamw"}
    for key, theirs, default in (
        ("lr", "learning_rate", 5e-5),
        ("weight_decay", "weight_decay", 0.0),
        ("clip", "max_grad_norm", 1.0),
    ):
        if (value := reading.number(theirs, absent=default)) is not None:
            recipe[key] = float(value)
    if kind == "sgd":
        return recipe | {"momentum": 0.0}
    for key, theirs, default in (
        ("beta1", "adam_beta1", 0.9),
        ("beta2", "adam_beta2", 0.999),
        ("eps", "adam_epsilon", 1e-8),
    ):
        if (value := reading.number(theirs, absent=default)) is not None:
            recipe[key] = float(value)
    return recipe


def _schedule(reading: Reading) -> dict[str, Any]:
    name, inside = reading.word("lr_scheduler_type") or "linear", "lr_scheduler_kwargs"
    recipe: dict[str, Any] = {"schedule": _SCHEDULES.get(name, "cosine"), "warmup": 0}
    if name not in _SCHEDULES:
        reading.note(f"lr_scheduler_type {name}: no counterpart; nearest: cosine")
    steps, share = reading.number("warmup_steps") or 0, reading.number("warmup_ratio") or 0.0
    if name == "constant":
        return recipe
    if steps:
        recipe["warmup"] = int(steps) if steps >= 1 else float(steps)
    elif share:
        recipe["warmup"] = float(share)
    least = reading.number(f"{inside}.min_lr_rate") or reading.number(f"{inside}.min_lr_ratio")
    if least:
        recipe["lr_min"] = float(least)
    if (decay := reading.count(f"{inside}.num_decay_steps")) is not None:
        recipe["decay"] = decay
    reading.skip(f"{inside}.decay_type")
    return recipe


def _length(reading: Reading) -> dict[str, Any]:
    """In steps, or otherwise in epochs."""
    steps, epochs = reading.number("max_steps"), reading.number("num_train_epochs", absent=3.0)
    if steps is not None and steps > 0:
        return {"steps": int(steps)}
    return {} if epochs is None else {"epochs": float(epochs)}
