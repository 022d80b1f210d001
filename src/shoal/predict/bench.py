"""Rates of one model on one cluster with one stack, shared by all layouts of a search."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from shoal.facts import calibration
from shoal.facts.calibration import Calibration
from shoal.facts.cluster import Cluster
from shoal.facts.model import Model
from shoal.facts.precision import compute_width, state_width
from shoal.facts.recipe import Recipe
from shoal.facts.stack import SHOAL, Stack
from shoal.predict import counted
from shoal.predict import layer as layers
from shoal.predict.eager import Widths
from shoal.predict.kernels import Kernels
from shoal.predict.layer import Passes, Seconds, Share
from shoal.predict.links import Links
from shoal.predict.measured import MeasuredKernels
from shoal.predict.question import Question


@dataclass(eq=False)
class Bench:
    """What all of a search's layouts share, priced once."""

    model: Model
    cluster: Cluster
    recipe: Recipe
    stack: Stack
    rates: Calibration
    _layers: dict[tuple[object, ...], Seconds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.links = Links(self.cluster, self.rates)
        device, recipe, measured = self.cluster.device, self.recipe, self.rates.measured
        widths = Widths(compute_width(recipe), state_width(recipe))
        self.kernels: Kernels
        # What was measured are the kernels of our own engine; other software starts others.
        if measured is not None and self.stack.name == SHOAL.name:
            # Measured as one device is all of a CPU; where there are several here, they share it.
            shared = self.cluster.devices_per_node if device.name == "cpu" else 1
            self.kernels = MeasuredKernels(self.rates, measured, recipe.precision, widths, shared)
        else:
            peak = device.peak(recipe.precision) or 1e12
            self.kernels = Kernels(self.rates.device, peak, device.memory_bandwidth or 50e9, widths.compute)

    def layer(self, share: Share) -> Seconds:
        known = self._layers.get(share_key := (*vars(share).values(),))
        if known is None:
            known = self._layers[share_key] = (
                counted.layer(self.model, self.kernels, share)
                if isinstance(self.kernels, MeasuredKernels)
                else layers.layer(self.model, self.stack, self.kernels, share)
            )
        return known

    def head(self, tokens: int, rows: int, held: Passes) -> Seconds:
        """The head with ``rows`` of the vocabulary, and the loss."""
        if isinstance(self.kernels, MeasuredKernels):
            return counted.head(self.model, self.kernels, tokens, rows, held)
        return layers.head(self.model, self.stack, self.kernels, tokens, rows, held)

    def embedding(self, tokens: int, rows: int, held: Passes, tied_here: bool = False) -> Seconds:
        """``tied_here``: the head's gradient is added to this one's."""
        if isinstance(self.kernels, MeasuredKernels):
            return counted.embedding(self.model, self.kernels, tokens, rows, held, tied_here)
        return layers.embedding(self.model, self.kernels, tokens)

    def handling(self, sharded: bool, micro_batches: int) -> Passes:
        """Bytes that move for every parameter and micro-batch."""
        if isinstance(self.kernels, MeasuredKernels):
            return counted.handling(self.kernels.widths, sharded, micro_batches)
        return layers.handling(self.stack, self.recipe, sharded, micro_batches)


def bench(question: Question) -> Bench:
    rates = calibration.find(question.cluster)
    return _bench(question.model, question.cluster, question.recipe, question.stack, rates)


@cache
def _bench(model: Model, cluster: Cluster, recipe: Recipe, stack: Stack, rates: Calibration) -> Bench:
    return Bench(model, cluster, recipe, stack, rates)
