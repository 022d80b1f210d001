"""Device counts: the fewest that a model fits on, that meet a deadline, or that are fastest within a budget.

Clusters come in whole nodes and in steps of a quarter of the next power of two: other counts divide neither a batch
nor the layers of a model evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from shoal.facts.cluster import default_per_node
from shoal.facts.layout import Layout
from shoal.plan.choose import replicas_only
from shoal.plan.goodput import state_bytes
from shoal.plan.judge import Plan, engine_runs
from shoal.plan.request import PlanRequest
from shoal.plan.scale import Cost, best, cost, resized
from shoal.plan.unspecified import pretraining_batch
from shoal.predict.flops import flops_per_token

MOST = 131_072
# The MFU of the first guess.
GUESS = 0.4
# How much smaller than a usual size an odd number of nodes must be.
SAVES = 0.05
# How often a budget's device count is doubled, and the share of the best per-device throughput on fewer devices that
# it must keep.
DOUBLINGS = 14
WELL = 0.75


@dataclass(frozen=True)
class HowMany:
    """A device count, its plan, and how certain it is."""

    asked: PlanRequest  # with that device count
    devices: int
    why: str
    needed: float | None = None  # devices needed at this plan's rate, between cluster sizes
    error_bar: float | None = None
    tried: tuple[int, ...] = ()

    @property
    def between(self) -> tuple[int, int] | None:
        """The fewest and the most devices within the error bar."""
        if self.needed is None or self.error_bar is None:
            return None
        return math.floor(self.needed * (1 - self.error_bar)), math.ceil(self.needed * (1 + self.error_bar))

    @property
    def text(self) -> str:
        if self.between is None or self.needed is None:
            return f"{self.devices:,} GPUs: {self.why}"
        low, high = self.between
        return (
            f"{self.devices:,} GPUs: {self.why}; the run needs {math.ceil(self.needed):,} of them, "
            f"{low:,} to {high:,} with the error bar of ±{self.error_bar:.0%}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "needed": self.needed,
            "low": self.between[0] if self.between else None,
            "high": self.between[1] if self.between else None,
            "error_bar": self.error_bar,
            "tried": list(self.tried),
            "text": self.text,
        }


Priced = tuple[PlanRequest, Plan, Cost]
Tries = Callable[[int], tuple[PlanRequest, Plan] | None]


def how_many(asked: PlanRequest) -> HowMany | None:
    """The device count for the request; None if none up to ``MOST`` works, and on a CPU, whose processes are not a
    cluster.

    At least as many as hold the states: fewer could train from host memory or NVMe, but slowly.
    """
    if replicas_only(asked.cluster):
        return None
    at_least = state_bytes(asked.workload(Layout())) / asked.cluster.device.memory_bytes
    counts = [count for count in sizes(asked) if count >= at_least]
    runnable = engine_runs(asked.workload(Layout()))

    @cache
    def tries(devices: int) -> tuple[PlanRequest, Plan] | None:
        request = with_count(asked, devices)
        plan = best(request, runnable) if request else None
        return (request, plan) if request and plan else None

    if asked.tokens is not None and asked.deadline is not None:
        return _for_deadline(asked, counts, tries)
    if asked.tokens is not None and asked.budget is not None:
        return _for_budget(asked, counts, tries)
    return _smallest(asked, counts, tries)


def sizes(asked: PlanRequest) -> list[int]:
    """Device counts that clusters of this device come in."""
    node = _per_node(asked)
    found = {size for size in (1, 2, 4) if size < node}
    quarters = (quarter << power for power in range(16) for quarter in (1, 2, 3, 4, 5, 6, 7))
    return sorted(found | {node * nodes for nodes in quarters if node * nodes <= MOST})


def _per_node(asked: PlanRequest) -> int:
    """Devices per node, as in the request if it has several."""
    cluster = asked.cluster
    return cluster.devices_per_node if cluster.nodes > 1 else default_per_node(cluster.device, MOST)


def with_count(asked: PlanRequest, devices: int) -> PlanRequest | None:
    """The same request on this many devices; a batch left open takes the usual value there."""
    request = resized(asked, devices)
    if request is None or asked.own_batch or asked.tokens is None:
        return replace(request, counted=True) if request else None
    batch = pretraining_batch(asked.model, asked.recipe.seq, asked.tokens, devices)
    return replace(request, counted=True, recipe=asked.recipe.model_copy(update={"batch": batch}))


def _for_deadline(asked: PlanRequest, counts: list[int], tries: Tries) -> HowMany | None:
    """The smallest size that meets the deadline: start from a guess, correct it by each try, then step down."""
    assert asked.tokens is not None and asked.deadline is not None
    peak = asked.cluster.device.peak(asked.recipe.precision) or 1e14
    wanted = flops_per_token(asked.model, asked.recipe.seq) * asked.tokens / (GUESS * peak * asked.deadline)
    looked: list[int] = []
    found: Priced | None = None
    place = _from(counts, wanted)
    while 0 <= place < len(counts) and counts[place] not in looked:
        looked.append(counts[place])
        priced = _priced(asked, tries, counts[place])
        enough = _from(counts, _needed(priced, asked.deadline)) if priced else place + 1
        if priced is not None and priced[2].seconds <= asked.deadline:
            found = priced
            place = min(place - 1, enough)
        elif found is None:
            place = max(place + 1, enough)
        else:
            break
    if found is None:
        return None
    # Between two usual sizes: as many nodes as that rate requires, if that saves enough.
    node = _per_node(asked)
    fewer = node * math.ceil(_needed(found, asked.deadline) / node)
    if fewer <= (1 - SAVES) * found[1].world and fewer not in looked:
        looked.append(fewer)
        priced = _priced(asked, tries, fewer)
        found = priced if priced is not None and priced[2].seconds <= asked.deadline else found
    request, plan, total = found
    why = f"the smallest cluster of those tried that is in time ({total.days:.3g} days)"
    needed = _needed(found, asked.deadline)
    return HowMany(request, plan.world, why, needed, plan.error_bar, tuple(sorted(looked)))


def _needed(priced: Priced, deadline: float) -> float:
    return priced[1].world * priced[2].seconds / deadline


def _from(counts: list[int], wanted: float) -> int:
    return next((place for place, count in enumerate(counts) if count >= wanted), len(counts) - 1)


def _for_budget(asked: PlanRequest, counts: list[int], tries: Tries) -> HowMany | None:
    """The fastest within the budget, doubling from the smallest count that fits; if none is affordable, the cheapest.

    Few devices recompute what more of them keep, so a run first gets cheaper, then dearer. The rest of a budget is not
    spent on devices that wait for one another.
    """
    assert asked.budget is not None
    most, waits = 0.0, False
    first = _smallest(asked, counts, tries)
    within: Priced | None = None
    cheapest: Priced | None = None
    looked = [*first.tried] if first else []
    for times in range(DOUBLINGS):
        priced = _priced(asked, tries, first.devices << times) if first else None
        if priced is None:
            break
        looked.append(priced[1].world)
        rate = priced[1].tokens_per_s_per_gpu
        most = max(most, rate)
        if within is not None and rate < WELL * most:
            waits = True
            break
        money = priced[2].cost or 0.0
        if money <= asked.budget:
            within = priced
        elif within is not None or (cheapest is not None and money >= (cheapest[2].cost or 0.0)):
            break
        if cheapest is None or money < (cheapest[2].cost or 0.0):
            cheapest = priced
    found = within or cheapest
    if found is None:
        return None
    request, plan, total = found
    word = (
        "the fastest of those tried within the budget"
        if within
        else "over the budget, but no other number is cheaper"
    )
    why = f"{word} ({total.cost or 0.0:,.0f}, {total.days:.3g} days)"
    if waits:
        why += f"; on {looked[-1]:,} a GPU would do less than {WELL:.0%} of what it can"
    return HowMany(request, plan.world, why, error_bar=plan.error_bar, tried=tuple(sorted({*looked})))


def _priced(asked: PlanRequest, tries: Tries, devices: int) -> Priced | None:
    answer = tries(devices) if devices <= MOST else None
    if answer is None or asked.tokens is None:
        return None
    return (*answer, cost(answer[1], asked.tokens, asked.price))


def _smallest(asked: PlanRequest, counts: list[int], tries: Tries) -> HowMany | None:
    """The smallest count on which something fits without offload."""
    looked: list[int] = []
    for devices in counts:
        looked.append(devices)
        answer = tries(devices)
        if answer is not None and not answer[1].layout.offload:
            why = f"the smallest cluster that {asked.model.name} trains on without offload"
            return HowMany(answer[0], devices, why, error_bar=answer[1].error_bar, tried=tuple(looked))
    return None
