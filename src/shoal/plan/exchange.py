"""How long data ranks exchange gradients and weights in a step at least: all of a kind as one message."""

from __future__ import annotations

from typing import NamedTuple

from shoal.facts.parameter_groups import Placement
from shoal.facts.precision import compute_width, reduce_width, state_width
from shoal.plan.space import UNITS
from shoal.predict.step import Bench


class Exchange(NamedTuple):
    """Seconds that data ranks exchange in a step, by what they do it beside."""

    forward: float
    backward: float
    alone: float


class Sums(NamedTuple):
    """What decides how often something is exchanged."""

    on: Bench
    persists: bool  # gathered groups may stay until their backward pass
    frozen: bool  # weights have no gradients
    times: int  # micro-batches
    piped: bool  # in a pipeline everything is exchanged once a step
    zero: int


def exchanged(sums: Sums, elements: int, placed: Placement) -> Exchange:
    """Of so many parameters on a rank."""
    recipe, seconds = sums.on.recipe, sums.on.links.seconds
    (_, shards, stride), (_, copies, copies_stride) = placed
    passes = 1 if sums.piped else sums.times
    reduced = 0 if sums.frozen else elements * reduce_width(recipe)
    backward = 0.0
    if reduced:
        backward = seconds("all_reduce", reduced // shards, copies, copies_stride)
    if shards == 1:
        return Exchange(0.0, backward, 0.0)
    scattered = seconds("reduce_scatter", reduced, shards, stride) if reduced else 0.0
    if sums.zero == 3:
        gathered = passes * seconds("all_gather", elements * compute_width(recipe), shards, stride)
        # The last group of blocks stays gathered for the backward pass; so may those that are told to persist.
        again = 0.0
        if not sums.piped and not sums.persists:
            again = gathered * max(0.0, 1 - UNITS[-1] / sums.on.model.layers)
        return Exchange(gathered, again + backward + passes * scattered, 0.0)
    if not reduced:
        return Exchange(0.0, 0.0, 0.0)
    updated = seconds("all_gather", int(elements * state_width(recipe)), shards, stride)
    return Exchange(0.0, backward + (passes if sums.zero == 2 else 1) * scattered, updated)
