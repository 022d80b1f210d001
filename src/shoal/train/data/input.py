"""A run's loader, built from its config and data: samples, their order, and the validation sets."""

from __future__ import annotations

from fractions import Fraction

from shoal.facts.config import Config, DataSection
from shoal.facts.problem import BadInput
from shoal.facts.sample_clock import SampleClock
from shoal.train.data.collection import Collection
from shoal.train.data.loader import Loader
from shoal.train.data.mixed_order import MixedOrder, MixPhase
from shoal.train.data.order import MASK, GlobalOrder, GroupedOrder, SampleOrder, mix
from shoal.train.data.samples import CutSamples, Samples, cut_samples
from shoal.train.data.tokenizers import Tokenizer
from shoal.train.data.window_order import WindowOrder


def open_loader(config: Config, data: Collection, tokenizer: Tokenizer) -> Loader:
    cut = cut_samples(data, config.data, config.recipe.seq, tokenizer.end)
    judged = cut.validation.get(config.evaluate.watched)
    order = order_of(config, cut)
    return Loader(cut.train, order, config.recipe.clock, judged, cut.validation)


def order_of(config: Config, cut: CutSamples) -> SampleOrder:
    """The order of samples. Samples that belong together are neighbours in every step."""
    together = cut.parts[0].together
    order = _order_of_groups(config, cut, together)
    return order if together == 1 else GroupedOrder(order, together)


def _order_of_groups(config: Config, cut: CutSamples, together: int) -> SampleOrder:
    seed = config.recipe.seed
    if not config.data.mix:
        return _order(config.data, seed, cut.parts[0])
    # Without seeds of their own, parts of equal length would always be paired in the same order.
    seeds = [mix((seed + number) & MASK) for number in range(len(cut.parts))]
    parts = [_order(config.data, one, part) for one, part in zip(seeds, cut.parts, strict=True)]
    counts = [len(part) // together for part in cut.parts]
    return MixedOrder(parts, counts, phases(config.data, config.recipe.clock, together))


def _order(data: DataSection, seed: int, samples: Samples) -> SampleOrder:
    together = samples.together
    if data.shuffle == "window":
        return WindowOrder(seed, [bound // together for bound in samples.shard_bounds], data.window)
    return GlobalOrder(seed, len(samples) // together)


def phases(data: DataSection, clock: SampleClock, together: int = 1) -> list[MixPhase]:
    """A mix's weights: the initial ones, and those after each step that changes one."""
    found = []
    for step in sorted({1, *(change.step for part in data.mix for change in part.later)}):
        weights = tuple(Fraction(str(part.weight_at(step))) for part in data.mix)
        if not any(weights):
            raise BadInput(f"every weight of data.mix is 0 from step {step} on", "give one part a weight")
        found.append(MixPhase(clock.before(step) // together, weights))
    return found
