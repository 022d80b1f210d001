"""The recipe's precisions as torch dtypes."""

from __future__ import annotations

import torch

from shoal.facts.recipe import Recipe

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(recipe: Recipe) -> torch.dtype:
    """Of activations and, where they are used, of weights."""
    return DTYPES[recipe.precision]


def parameter_dtype(recipe: Recipe) -> torch.dtype:
    """Of weights and optimizer states at rest; fp64 is a reference and keeps everything in it."""
    return torch.float64 if recipe.precision == "fp64" else DTYPES[recipe.states]


def reduce_dtype(recipe: Recipe) -> torch.dtype | None:
    """Of gradients on their way between ranks; None where that is how they are."""
    wanted = torch.float64 if recipe.precision == "fp64" else DTYPES[recipe.reduce]
    return None if wanted == parameter_dtype(recipe) else wanted
