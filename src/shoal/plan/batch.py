"""Check whether the batch limits throughput, and which batch would not: by planning it, not by guessing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from shoal.plan.headroom import free_bytes
from shoal.plan.judge import WIDEST, Plan
from shoal.plan.request import PlanRequest
from shoal.plan.scale import best, resized

# The batch is the limit if devices reach less than this share of what replicas would.
HELD_UP = 0.7
# A gain below this is not worth changing a recipe for, and a loss below it does not count.
WORTH_IT = 0.02
# Axes along which several devices work on one sequence.
SPLITS = ("tp", "cp", "pp")
# With this much memory free, sequences are not split over devices for lack of memory.
SPARE = 0.75
# Sequences this long are split over devices because of their length.
LONG = 32768
# Beyond this many devices a search is slow, so another batch is named but not tried.
MOST_DEVICES = 1024


@dataclass(frozen=True)
class Offer:
    """Another batch, or another device count, with its plan; ``gain`` is in tokens/s per device."""

    batch: int
    devices: int
    plan: Plan
    gain: float

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "batch": self.batch,
            "devices": self.devices,
            "layout": str(plan.layout),
            "step_seconds": plan.step.seconds,
            "tokens_per_s": plan.tokens_per_s,
            "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
            "gain": self.gain,
        }


@dataclass(frozen=True)
class BatchAdvice:
    """What a batch costs, and what to use instead."""

    batch: int
    devices: int
    data_ranks: int
    offers: list[Offer]  # empty if none was tried
    fewer: Offer | None  # the same batch on one node

    @property
    def text(self) -> str:
        limit = "is smaller than" if self.batch < self.devices else "does not divide evenly over"
        ranks = f"{self.data_ranks} data rank{'s' * (self.data_ranks > 1)}"
        said = f"The batch of {self.batch} {limit} the {self.devices} GPUs: only {ranks}, so the batch is the limit."
        others = [
            f"{offer.batch} ({offer.plan.layout}: {offer.gain:+.0%} tokens/s/GPU)" for offer in self.offers
        ]
        said += f" Better: a batch of {' or '.join(others or map(str, near(self.batch, self.devices)))}."
        if self.fewer is not None:
            share = self.fewer.devices * (1 + self.fewer.gain) / self.devices
            said += (
                f" Or fewer GPUs: {self.fewer.devices} ({self.fewer.plan.layout}) do {share:.0%} of what "
                f"{self.devices} do."
            )
        return said

    def as_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "devices": self.devices,
            "data_ranks": self.data_ranks,
            "offers": [offer.as_json() for offer in self.offers],
            "fewer": self.fewer.as_json() if self.fewer else None,
            "text": self.text,
        }


def batch_advice(asked: PlanRequest, plan: Plan) -> BatchAdvice | None:
    """None if every device can have sequences of its own, or the model needs several devices per sequence anyway."""
    batch, devices = asked.recipe.batch, plan.world
    long = asked.recipe.seq >= LONG and plan.layout.cp > 1  # so several devices split a sequence
    if batch in near(batch, devices) or long:
        return None
    if devices > MOST_DEVICES:
        said = BatchAdvice(batch, devices, plan.layout.data_ranks, [], None)
        return said if batch < devices and _starved(plan) else None
    tried = (_offer(asked, plan, each, devices) for each in near(batch, devices))
    offers = [offer for offer in tried if offer and _is_better(offer, plan)]
    if not offers:
        return None
    fewer = None
    node = asked.cluster.devices_per_node
    if batch < devices and devices > node:
        fewer = _offer(asked, plan, batch, node)
    return BatchAdvice(batch, devices, plan.layout.data_ranks, offers, fewer)


def _is_better(offer: Offer, plan: Plan) -> bool:
    """Whether more data ranks share it out, and that is faster. What as many do better is no matter of sharing out.

    Where there are as many data ranks as the batch allows, also what is as fast without an axis that splits the model.
    """
    here, there = plan.layout, offer.plan.layout
    plainer = {axis for axis in SPLITS if there.degrees[axis] > 1} < {
        axis for axis in SPLITS if here.degrees[axis] > 1
    }
    batch = plan.workload.recipe.batch
    least = WIDEST if batch < plan.world else WORTH_IT  # for a larger batch, what can be told apart
    if plainer and here.data_ranks == gcd(batch, plan.world):
        least = -WORTH_IT
    return there.data_ranks > here.data_ranks and offer.gain > least


def _starved(plan: Plan) -> bool:
    """Whether data ranks have one sequence each, or too few for their pipeline, or split sequences without a lack of
    memory, so that throughput suffers: what is reported where no other batch is tried."""
    layout = plan.layout
    each = plan.workload.recipe.batch // layout.data_ranks
    idle = free_bytes(plan.memory) > SPARE * plan.memory.capacity
    return (each == 1 or each < layout.pp or idle) and plan.vs_ddp < HELD_UP


def near(batch: int, devices: int) -> list[int]:
    """The nearest batches below and above that half of the devices divide evenly; if it is one already, all devices."""
    half = devices // 2
    unit = half if devices % 2 == 0 and batch > devices and batch % half else devices
    below, above = batch // unit * unit, -(-batch // unit) * unit
    return [each for each in (below, above) if each]


def _offer(asked: PlanRequest, plan: Plan, batch: int, devices: int) -> Offer | None:
    request = resized(asked, devices) if devices != asked.cluster.devices else replace(asked, layout=None)
    if request is None:
        return None
    recipe = asked.recipe.model_copy(update={"batch": batch})
    found = best(replace(request, recipe=recipe), plan.runs)
    if found is None:
        return None
    return Offer(batch, devices, found, found.tokens_per_s_per_gpu / plan.tokens_per_s_per_gpu - 1)
