"""Hardware rates and cached prices of one model on one cluster with one stack, shared by all layouts of a search."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shoal.facts import calibration
from shoal.facts.calibration import Calibration
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.stack import SHOAL, Stack
from shoal.facts.logits import at_once
from shoal.facts.model import Model
from shoal.facts.precision import compute_width, state_width
from shoal.facts.recipe import Recipe
from shoal.predict.time import adapters, measured_layer
from shoal.predict.time import layer as layers
from shoal.predict.time.float8 import in_float8
from shoal.predict.time.kernels import Kernels
from shoal.predict.time.layer import LayerShare, Passes, Seconds, WeightStorage
from shoal.predict.time.links import Links
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.operators import Widths
from shoal.predict.time.unpacking import unpacked
from shoal.predict.workload import Workload


@dataclass(eq=False)
class CostModel:
    """What all layouts of a search share, priced once."""

    model: Model
    cluster: Cluster
    recipe: Recipe
    stack: Stack
    rates: Calibration
    _layers: dict[tuple[object, ...], Seconds] = field(default_factory=dict)
    _heads: dict[tuple[object, ...], Seconds] = field(default_factory=dict)
    _parts: dict[tuple[object, ...], Any] = field(default_factory=dict)
    _handled: dict[tuple[WeightStorage, int, bool], Passes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.links = Links(self.cluster, self.rates)
        self.node = calibration.node_rates(self.cluster, self.rates)
        device, recipe, measured = self.cluster.device, self.recipe, self.rates.measured
        widths = Widths(compute_width(recipe), state_width(recipe))
        # fp8 applies to the blocks' products; attention, the head and everything else run in bf16.
        precision = "bf16" if recipe.precision == "fp8" else recipe.precision
        self.faster = (device.peak(recipe.precision) or 1.0) / (device.peak(precision) or 1.0)
        self.kernels: Kernels
        # Measurements cover the kernels of our own engine; other stacks launch others.
        if measured is not None and self.stack.name == SHOAL.name:
            # A CPU is measured as one device; several devices here share it.
            shared = self.cluster.devices_per_node if device.name == "cpu" else 1
            self.kernels = MeasuredKernels(self.rates, measured, precision, widths, shared)
        else:
            peak = device.peak(precision) or 1e12
            reached = self.rates.device
            if self.stack.name == SHOAL.name and reached.sustained < 1:
                reached = reached.model_copy(update={"matmul": reached.matmul * reached.sustained})
            self.kernels = Kernels(reached, peak, device.memory_bandwidth or 50e9, widths.compute)
        # Whether it matters how many sequences a micro-batch's tokens belong to.
        measured_here = isinstance(self.kernels, MeasuredKernels)
        self.counts_sequences = measured_here or self.stack.attention == "unfused"

    def layer(self, share: LayerShare) -> Seconds:
        # Otherwise long sequences cut into parts cost as much as short ones with as many tokens.
        key = share if self.counts_sequences else share[:2] + share[3:]
        known = self._layers.get(key)
        if known is None:
            known = (
                measured_layer.layer(self.model, self.kernels, share)
                if isinstance(self.kernels, MeasuredKernels)
                else self._composed(share)
            )
            if self.faster > 1:
                known = in_float8(self.model, self.kernels, share, known, self.faster)
            if share.unpacks:
                known = unpacked(self.model, self.kernels, share, known)
            if share.adapted:
                known = adapters.beside(self.model, self.kernels, share, known)
            self._layers[key] = known
        return known

    def _composed(self, share: LayerShare) -> Seconds:
        """Composed of parts that depend on few fields each, so that most parts of a new share are cached."""
        parts, given = self._parts, (self.model, self.stack, self.kernels, share)
        key = share.of_products
        products = parts.get(key)
        if products is None:
            products = parts[key] = layers.multiplied(*given)
        key = share.of_elements
        elementwise = parts.get(key)
        if elementwise is None:
            elementwise = parts[key] = layers.elementwise(*given)
        key = share.of_attention(self.counts_sequences)
        attended = parts.get(key)
        if attended is None:
            attended = parts[key] = layers.attention(*given)
        return layers.layer(self.stack, self.kernels, share, products, elementwise, attended)

    def attention(self, share: LayerShare) -> tuple[float, float]:
        """Attention's part of a layer's time, forward and backward."""
        if isinstance(self.kernels, MeasuredKernels):
            return measured_layer.attention(self.model, self.kernels, share)
        return layers.attention(self.model, self.stack, self.kernels, share)

    def shared_experts(self, share: LayerShare) -> tuple[float, float]:
        """The shared experts' products in a layer's time, forward and backward."""
        forward, backward = layers.shared_experts(self.model, self.kernels, share)
        return forward / self.faster, backward / self.faster

    def routed_experts(self, share: LayerShare) -> tuple[float, float]:
        """The routed experts' products in a layer's time, forward and backward."""
        forward, backward = layers.routed_experts(self.model, self.kernels, share)
        return forward / self.faster, backward / self.faster

    @property
    def fastest(self) -> float:
        """FLOP/s that no product exceeds."""
        return self.kernels.fastest * self.faster

    def head(self, tokens: int, rows: int, held: Passes, compiled: bool) -> Seconds:
        """The head with ``rows`` of the vocabulary, and the loss. ``compiled``: whether blocks are."""
        key = tokens, rows, held, compiled
        known = self._heads.get(key)
        if known is None:
            known = self._heads[key] = self._head(tokens, rows, held, compiled)
        return known

    def _head(self, tokens: int, rows: int, held: Passes, compiled: bool) -> Seconds:
        if isinstance(self.kernels, MeasuredKernels):
            once = self.stack.one_loss_kernel and at_once(
                self.cluster.device.name != "cpu", self.model.logit_cap is not None
            )
            found = measured_layer.head(self.model, self.kernels, tokens, rows, held, compiled, once)
        else:
            found = layers.head(self.model, self.stack, self.kernels, tokens, rows, held)
        if not self.recipe.loss_facts.of_log_probabilities:
            return found
        # The backward pass recomputes the logits, and all of the head's gradients.
        product = self.kernels.slowed(compiled) * self.kernels.product(tokens, self.model.hidden, rows)
        return Seconds(product, found.forward + found.input, found.weight, 0.0, 0.0)

    def embedding(self, tokens: int, rows: int, held: Passes, tied_here: bool = False) -> Seconds:
        """``tied_here``: the head's gradient is added to this one."""
        if isinstance(self.kernels, MeasuredKernels):
            return measured_layer.embedding(self.model, self.kernels, tokens, rows, held, tied_here)
        return layers.embedding(self.model, self.kernels, tokens)

    def handling(self, rests: WeightStorage, micro_batches: int, narrow: bool = False) -> Passes:
        """Bytes moved per parameter and micro-batch. ``narrow``: gradients stay in the compute precision."""
        key = rests, micro_batches, narrow
        known = self._handled.get(key)
        if known is None:
            if isinstance(self.kernels, MeasuredKernels):
                known = measured_layer.handling(self.kernels.widths, self.recipe, *key)
            else:
                known = layers.handling(self.stack, self.recipe, rests, micro_batches)
            self._handled[key] = known
        return known


def cost_model(workload: Workload) -> CostModel:
    rates = calibration.find(workload.cluster)
    return _bench(workload.model, workload.cluster, workload.recipe, workload.stack, rates)


@cache
def _bench(model: Model, cluster: Cluster, recipe: Recipe, stack: Stack, rates: Calibration) -> CostModel:
    return CostModel(model, cluster, recipe, stack, rates)
