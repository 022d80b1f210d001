"""What a replica of a model holds between two steps: weights, gradients, optimizer states. Exact, in bytes."""

from __future__ import annotations

from shoal.facts.model import Model
from shoal.facts.parameters import parameter_count
from shoal.facts.recipe import OPTIMIZER_STATES, Recipe


def replica_states(model: Model, recipe: Recipe) -> dict[str, int]:
    """Bytes of one unsharded replica. All three rest in the precision of ``states``; fp64 keeps everything in fp64."""
    width = 8 if recipe.precision == "fp64" else {"fp32": 4, "bf16": 2, "int8": 1}[recipe.states]
    weights = parameter_count(model) * width
    kept = len(OPTIMIZER_STATES[recipe.optimizer])
    return {"params": weights, "grads": weights, "optimizer": weights * kept}
