"""The optimizer: AdamW or SGD, fused, with weight decay on matrices only; clipping; the loss scale of fp16; and the
learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from shoal.facts.recipe import Recipe
from shoal.parallel.shards import Shard, gradient


def build(pieces: list[Shard], recipe: Recipe) -> torch.optim.Optimizer:
    """Two groups, decayed and not: norms and biases, the vectors, carry no weight decay."""
    groups: list[dict[str, Any]] = [
        {"params": [piece.tensor for piece in pieces if piece.decayed], "weight_decay": recipe.weight_decay},
        {"params": [piece.tensor for piece in pieces if not piece.decayed], "weight_decay": 0.0},
    ]
    # At many ranks one may hold nothing: some parameter's last rows are elsewhere, and so are all others'.
    nothing: dict[str, Any] = {"params": [torch.nn.Parameter(torch.empty(0))]}
    groups = [group for group in groups if group["params"]] or [nothing]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.peak_lr, momentum=recipe.momentum, fused=True)
    return torch.optim.AdamW(
        groups, lr=recipe.peak_lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=True
    )


def unscale(pieces: list[Shard], scale: float) -> None:
    """Take the loss scale off the gradients."""
    if scale != 1.0:
        for piece in pieces:
            gradient(piece).div_(scale)


def squared_norm(pieces: list[Shard]) -> float:
    """The squares of these gradients, added up in at least fp32: torch's own total has the gradients' precision."""
    gradients = [gradient(piece) for piece in pieces]
    if any(one.dtype.itemsize < 4 for one in gradients):
        each = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in gradients]
        norm = float(torch.linalg.vector_norm(torch.stack(each)))
    else:
        norm = float(torch.nn.utils.get_total_norm(gradients))
    return norm * norm  # not norm**2, which raises where this gives infinity


def clip(pieces: list[Shard], limit: float, norm: float) -> None:
    """Shrink gradients whose norm, over all ranks, is ``norm`` to ``limit`` (0: do not)."""
    if limit and pieces:
        wide = torch.promote_types(pieces[0].tensor.dtype, torch.float32)
        total = torch.tensor(norm, dtype=wide, device=pieces[0].tensor.device)
        torch.nn.utils.clip_grads_with_norm_([piece.tensor for piece in pieces], limit, total)


@dataclass
class LossScale:
    """fp16's small gradients vanish unless the loss is scaled up. Halved on overflow, doubled after a quiet while.

    torch's GradScaler keeps the same two numbers but unscales on its own, apart from clipping, and its verdict on
    overflow is a rank's; ours comes from the summed gradients' norm, which is every rank's.
    """

    value: float = 1.0
    quiet: int = 0  # steps since the last overflow
    patience: int = 2000
    enabled: bool = False

    @classmethod
    def for_precision(cls, precision: str) -> LossScale:
        return cls(value=2.0**16, enabled=True) if precision == "fp16" else cls()

    def update(self, overflow: bool) -> None:
        if not self.enabled:
            return
        self.quiet = 0 if overflow else self.quiet + 1
        if overflow:
            self.value /= 2
        elif self.quiet % self.patience == 0:
            self.value *= 2


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of update number ``step``, from 1. Warm-up rises linearly and reaches the peak at its last step."""
    warmup = recipe.warmup_steps
    if step <= warmup:
        return recipe.peak_lr * (step / warmup)  # in this order the last is the peak exactly
    floor = recipe.lr_min
    return recipe.peak_lr * (floor + (1 - floor) * _shape(recipe, step - warmup, recipe.steps - warmup))


def _shape(recipe: Recipe, step: int, steps: int) -> float:
    """From 1 at the end of the warm-up to 0 at the end of the run, for step in 1..steps."""
    if recipe.schedule == "constant":
        return 1.0
    if recipe.schedule == "wsd":  # warm-up, stable, decay
        left, decay = steps - step, recipe.decay_steps
        return min(1.0, left / decay) if decay else 1.0
    done = step / steps
    return 1 - done if recipe.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
