"""Bytes per parameter: weight, gradient and optimizer states, by recipe and stack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shoal.facts.cluster.stack import Stack
from shoal.facts.optimizers import Rule, states_per_element
from shoal.facts.precision import COMPUTE_BYTES, MOMENT_BYTES, REDUCE_BYTES, STATE_BYTES
from shoal.facts.recipe import Precision, Recipe

# The weight average (EMA) is fp32 whatever the weights' precision, because its updates are small.
AVERAGE_BYTES = 4.0


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes per trained parameter, unless noted."""

    weight: float  # as stored
    gradient: float
    moments: float  # other optimizer states; for a hidden layer's matrix (facts/optimizers.py)
    master: float  # the copy that the optimizer updates, if the network reads a narrower one
    compute: int  # per value in the compute precision: activations, and weights as used
    reduce: int  # a gradient in a reduction

    @property
    def cast(self) -> bool:
        """Whether a weight is cast to the compute precision on use."""
        return self.weight != self.compute

    @property
    def wide(self) -> int:
        """The precision of norms, rotations and the loss: at least fp32."""
        return max(self.compute, 4)

    @property
    def frozen(self) -> float:
        """A frozen weight: stored as used, and no wider than trained weights."""
        return min(self.compute, max(self.weight, self.master))


def takes_narrow_gradients(precision: Precision, optimizer: str) -> bool:
    """Whether gradients may stay in the compute precision if nothing is accumulated.

    Not fp16's, which carry the loss scale and would vanish without it; nor with torch's SGD, which needs them as wide
    as its states.
    """
    return precision in ("bf16", "fp8") and optimizer == "adamw"


def bytes_per_parameter(
    recipe: Recipe, stack: Stack, sharded: bool = False, one_pass: bool = False
) -> BytesPerParameter:
    """For a recipe on a stack. ``sharded``: parameters are stored as shards. ``one_pass``: as in ``Layout``."""
    # Keyed by the relevant recipe fields, which hash faster than the whole recipe.
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
        # With master weights, gradients are reduced in their own precision.
        gradient = stack.gradient_bytes or compute
        if stack.sums_gradients:
            gradient = max(compute, REDUCE_BYTES[reduce])
        return BytesPerParameter(compute, gradient, kept_bytes, 4, compute, gradient)
    if stack.weights == "working" and not sharded and compute < state:
        narrow = stack.narrow_gradients and one_pass and takes_narrow_gradients(precision, optimizer)
        width = compute if narrow else state
        return BytesPerParameter(compute, width, kept_bytes, state, compute, REDUCE_BYTES[reduce])
    return BytesPerParameter(state, state, kept_bytes, 0, compute, REDUCE_BYTES[reduce])
