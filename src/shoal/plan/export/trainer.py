"""A recipe as Hugging Face ``TrainingArguments``, for scripts that use its Trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator

from shoal.predict.workload import Workload


def arguments(workload: Workload) -> dict[str, object]:
    """The recipe and one rank's batch, under the Trainer's names."""
    recipe = workload.recipe
    given: dict[str, object] = {
        "per_device_train_batch_size": workload.micro,
        "gradient_accumulation_steps": workload.accumulation,
        "max_steps": recipe.steps,
        "optim": "adamw_torch_fused" if recipe.optimizer == "adamw" else "sgd",
        "learning_rate": recipe.peak_lr,
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.clip,
        "warmup_steps": recipe.warmup_steps,
        "seed": recipe.seed,
        **_schedule(workload),
    }
    if recipe.optimizer == "adamw":
        given |= {"adam_beta1": recipe.beta1, "adam_beta2": recipe.beta2, "adam_epsilon": recipe.eps}
    if recipe.precision in ("bf16", "fp16"):
        given[recipe.precision] = True
    return given


def _schedule(workload: Workload) -> dict[str, object]:
    recipe = workload.recipe
    if recipe.schedule == "constant":
        return {"lr_scheduler_type": "constant_with_warmup"}
    if recipe.schedule == "linear":
        return {"lr_scheduler_type": "linear"}
    options: dict[str, object] = {}
    if recipe.schedule == "wsd":
        name = "warmup_stable_decay"
        options = {
            "num_decay_steps": recipe.decay_steps,
            "decay_type": "linear",
            "min_lr_ratio": recipe.lr_min,
        }
    elif recipe.lr_min:
        name, options = "cosine_with_min_lr", {"min_lr_rate": recipe.lr_min}
    else:
        name = "cosine"
    given: dict[str, object] = {"lr_scheduler_type": name}
    return given | ({"lr_scheduler_kwargs": json.dumps(options)} if options else {})


def cannot(workload: Workload) -> Iterator[str]:
    """Settings that the Trainer's arguments cannot express."""
    recipe = workload.recipe
    if recipe.schedule == "linear" and recipe.lr_min:
        yield f"lr_min={recipe.lr_min}: the Trainer's linear schedule ends at 0; nearest: that"
    if recipe.optimizer == "sgd" and recipe.momentum:
        yield f"momentum={recipe.momentum}: the Trainer's sgd has none; nearest: pass it an optimizer of your own"
    if recipe.states != "fp32":
        yield f"states={recipe.states}: the script decides it; nearest: load the model with dtype bfloat16"
    if recipe.z_loss:
        yield f"z_loss={recipe.z_loss}: the model computes the loss; nearest: 0"
    if recipe.dropout:
        yield f"dropout={recipe.dropout}: it belongs to the model's config.json; nearest: set it there"
