"""What is held between two steps: weights, gradients, optimizer states, in bytes."""

from __future__ import annotations

from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.parameters import parameter_count
from shoal.facts.recipe import OPTIMIZER_STATES, Recipe


def replica_states(model: Model, recipe: Recipe) -> dict[str, int]:
    """Bytes of one unsharded replica. All three rest in the precision of ``states``; fp64 keeps everything in fp64."""
    width = 8 if recipe.precision == "fp64" else {"fp32": 4, "bf16": 2, "int8": 1}[recipe.states]
    weights = parameter_count(model) * width
    kept = len(OPTIMIZER_STATES[recipe.optimizer])
    return {"params": weights, "grads": weights, "optimizer": weights * kept}


def rank_states(model: Model, recipe: Recipe, layout: Layout) -> dict[str, int]:
    """An even share of them: what a rank of this layout holds, but for padding and stages of unequal size."""
    whole = replica_states(model, recipe)
    sharded = {"params": layout.zero == 3, "grads": layout.zero >= 2, "optimizer": True}
    ranks = {name: layout.fsdp if on else 1 for name, on in sharded.items()}
    return {name: -(-size // (layout.tp * layout.pp * ranks[name])) for name, size in whole.items()}
