"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from shoal.facts.recipe import Recipe


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
