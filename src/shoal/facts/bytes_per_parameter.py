"""Bytes per parameter: weight, gradient and optimizer states, by recipe and stack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shoal.facts.cluster.stack import Stack
from shoal.facts.optimizers import Rule, states_per_element
from shoal.facts.precision import COMPUTE_BYTES, MOMENT_BYTES, REDUCE_BYTES, STATE_BYTES
from shoal.facts.recipe import Precision, Recipe

# An average of weights is fp32 whatever these rest in: its steps are small.
AVERAGE_BYTES = 4.0


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes a trained parameter, unless said otherwise."""

    weight: float  # at rest
    gradient: float
    moments: float  # all optimizer states but the master copy; of a matrix of the hidden layers (facts/optimizers.py)
    master: float  # the copy that the optimizer updates, where the network reads a narrower one
    compute: int  # a value of the computation: activations, and weights where they are used
    reduce: int  # a gradient on its way between ranks

    @property
    def cast(self) -> bool:
        """Whether a weight is copied into the compute precision where it is used."""
        return self.weight != self.compute

    @property
    def wide(self) -> int:
        """What norms, rotations and the loss are computed in: at least fp32."""
        return max(self.compute, 4)

    @property
    def frozen(self) -> float:
        """A weight that is not trained rests as it is used, and no wider than others rest."""
        return min(self.compute, max(self.weight, self.master))


def takes_narrow_gradients(precision: Precision, optimizer: str) -> bool:
    """Whether gradients may rest as they are computed, where nothing is added to them.

    Those of fp16 carry the loss scale, without which they would vanish; torch's SGD wants them as wide as its states.
    """
    return precision in ("bf16", "fp8") and optimizer == "adamw"


def bytes_per_parameter(
    recipe: Recipe, stack: Stack, sharded: bool = False, one_pass: bool = False
) -> BytesPerParameter:
    """Of a recipe, as a stack keeps them. ``sharded``: parameters rest in shards. ``one_pass``: as ``Layout`` says."""
    # By what matters of the recipe, which is quicker to look up than all of it.
    return _bytes_per_parameter(
        recipe.precision,
        recipe.states,
        recipe.reduce,
        recipe.optimizer,
        recipe.ema > 0,
        stack,
        sharded,
        one_pass,
    )


@lru_cache(maxsize=256)
def _bytes_per_parameter(
    precision: Precision,
    states: str,
    reduce: str,
    optimizer: Rule,
    average: bool,
    stack: Stack,
    sharded: bool,
    one_pass: bool,
) -> BytesPerParameter:
    compute = COMPUTE_BYTES[precision]
    kept = states_per_element(optimizer)
    if precision == "fp64":  # a reference: everything is fp64
        return BytesPerParameter(8, 8, 8 * (kept + average), 0, 8, 8)
    state, kept_bytes = STATE_BYTES[states], MOMENT_BYTES[states] * kept + AVERAGE_BYTES * average
    if stack.weights == "master":
        # Gradients beside a master copy travel as they are.
        gradient = stack.gradient_bytes or compute
        if stack.sums_gradients:
            gradient = max(compute, REDUCE_BYTES[reduce])
        return BytesPerParameter(compute, gradient, kept_bytes, 4, compute, gradient)
    if stack.weights == "working" and not sharded and compute < state:
        narrow = stack.narrow_gradients and one_pass and takes_narrow_gradients(precision, optimizer)
        width = compute if narrow else state
        return BytesPerParameter(compute, width, kept_bytes, state, compute, REDUCE_BYTES[reduce])
    return BytesPerParameter(state, state, kept_bytes, 0, compute, REDUCE_BYTES[reduce])
