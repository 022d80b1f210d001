"""Find the fastest legal layouts that fit.

A strategy (degrees, and what data ranks share) is answered with its fastest layout, so that a list of plans is not one
plan with ten small differences. What the engine runs is searched first and by itself, then everything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from shoal.facts.cluster import Cluster
from shoal.facts.cluster.stack import SHOAL, Stack
from shoal.facts.config import Lora, TuneSection
from shoal.facts.layout import Layout, divisors
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.plan import explain
from shoal.plan.best_first import BestFirst, Priced, Prices, StrategyKey, balanced
from shoal.plan.choose import Chosen, choose, planned, replicas_alone, replicas_only
from shoal.plan.headroom import NONE, USUAL, Headroom
from shoal.plan.judge import Plan, replicas
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.space import Space
from shoal.plan.time_bound import TimeBound
from shoal.predict.time.step import cost_model
from shoal.predict.workload import Workload

TOP = 10
REJECTED = 20
# Work that a hunt does at most (``plan/best_first.py``); one that is broken off says what it may have missed.
EFFORT = 12_000_000
# And one for further strategies to list, which are at most so much slower than the fastest.
LISTING, FARTHEST = 2_000_000, 1.5


@dataclass(frozen=True)
class Rejected:
    """A layout that lost, and why."""

    layout: Layout
    reason: str


@dataclass
class SearchResult:
    """The answer of a search."""

    plans: list[Plan]  # best first; those within the error bar of the best are marked
    rejected: list[Rejected]  # nearest first
    searched: int  # layouts of the space; all of them are decided where the search is complete
    evaluated: int  # of these, how many were priced one by one
    seconds: float
    complete: bool  # whether the search came to its end; if not, ``at_best`` is what it may have missed
    at_best: float | None = None  # seconds of a step that no layout left out can be faster than
    chosen: Chosen | None = None  # what to run

    @property
    def proven(self) -> bool:
        """Whether no layout is faster than the first plan."""
        return self.complete or bool(self.plans and self.plans[0].step.seconds <= (self.at_best or 0.0))

    @property
    def ties(self) -> list[Plan]:
        return [plan for plan in self.plans if plan.tie]

    @property
    def runnable(self) -> Plan | None:
        """The best that the engine runs."""
        return next((plan for plan in self.plans if plan.runs), None)


def search(
    model: Model,
    cluster: Cluster,
    recipe: Recipe,
    *,
    top: int = TOP,
    lora: Lora | None = None,
    stack: Stack = SHOAL,
    tune: TuneSection | None = None,
    runnable: bool = False,
    devices: int | None = None,
    compile: bool | None = None,
    effort: int | None = EFFORT,
    headroom: Headroom | None = None,
) -> SearchResult:
    """The fastest layout of each of the ``top`` best strategies, and among them one that the engine runs.

    ``runnable``: only what the engine runs. ``devices``: how many of the cluster's to use, all unless said.
    ``headroom``: what every plan leaves free; unless said, the chosen one leaves the usual, if there is one that does.
    ``effort``: how much work to do at most, in bounds; None: as much as it takes.
    """
    started = time.perf_counter()
    asked = Workload(model, cluster, recipe, Layout(), stack, tune or TuneSection(), lora, compile)
    count_of_devices = devices or cluster.devices
    space = Space(model, recipe, count_of_devices, apart=cluster.device.name != "cpu", lora=lora)
    bounds = TimeBound(cost_model(asked), asked.tune, lora, count_of_devices, space.pipelines, compile)
    room = MemoryBound(model, cluster, recipe, stack, lora, bounds, compile, headroom or NONE)
    prices = Prices(asked, bounds)
    against = replicas(replace(asked, layout=Layout(dp=count_of_devices)), bounds.on)
    # What may be chosen: of what the engine runs, if that is anything. Where nothing leaves the usual headroom, what
    # leaves less.
    able = space.runs or runnable
    runs = replace(space, runnable=able)
    hunts: list[BestFirst] = []
    rival: Priced | None = None
    choosing = room
    for choosing in (room,) if headroom else (replace(room, headroom=USUAL), room):
        hunts.append(BestFirst(prices, choosing, replace(runs, tried=True)))
        if rival := hunts[-1].run(effort):
            break
    # The fastest of that, and of all.
    whole = [BestFirst(prices, room, runs, best=rival)]
    fastest = whole[0].run(effort)
    if not runnable and len(space.offloads) > len(runs.offloads):
        whole.append(BestFirst(prices, room, space, best=fastest))
        whole[-1].run(effort)
    hunts += whole
    chosen = None
    if replicas_only(cluster):
        chosen = replicas_alone(prices, count_of_devices, against, room.headroom)
    elif best := fastest or whole[-1].best:
        among = replace(runs if fastest else space, tried=rival is not None)
        chosen = choose(prices, choosing, among, rival or best, best, against)
    found = _ranked(prices, room, space, hunts, top)
    plans = [planned(one, against) for one in found]
    for plan in plans:
        plan.tie = plan.step.seconds <= plans[0].limit
    at_best = min((hunt.at_best for hunt in whole if hunt.at_best is not None), default=None)
    return SearchResult(
        plans,
        _rejected(prices, hunts, plans),
        (runs if runnable else space).size(),
        prices.evaluated,
        time.perf_counter() - started,
        complete=at_best is None,
        at_best=at_best,
        chosen=chosen,
    )


def searched(
    workload: Workload, top: int = TOP, runnable: bool = False, headroom: Headroom | None = None
) -> SearchResult:
    """A search for any layout of a workload but its own, on as many devices as there is use for.

    Broken off empty-handed it is carried to its end: that nothing fits is said only when it is certain.
    """
    given = workload.model, workload.cluster, workload.recipe
    found: SearchResult | None = None
    for devices in usable(workload.cluster, workload.recipe.batch // workload.recipe.loss_facts.rows):
        for effort in (EFFORT, None):
            found = search(
                *given,
                top=top,
                lora=workload.lora,
                tune=workload.tune,
                runnable=runnable,
                devices=devices,
                compile=workload.compile,
                effort=effort,
                headroom=headroom,
            )
            if found.plans:
                return found
            if found.complete:
                break
    assert found is not None
    return found


def usable(cluster: Cluster, batch: int) -> list[int]:
    """Numbers of devices to plan for, the best first. Devices of this machine, and processes on a CPU, may also stay
    idle: there, as many as the batch divides over.
    """
    if cluster.name != "local" and cluster.device.name != "cpu":
        return [cluster.devices]
    return [count for count in reversed(divisors(max(1, batch))) if count <= cluster.devices]


def _ranked(
    prices: Prices, room: MemoryBound, space: Space, hunts: list[BestFirst], top: int
) -> list[Priced]:
    """The fastest layout of each strategy, and the fastest of all first."""
    best: dict[StrategyKey, Priced] = {}

    def take(one: Priced) -> None:
        if one.strategy not in best or one.step.seconds < best[one.strategy].step.seconds:
            best[one.strategy] = one

    for hunt in hunts:
        if hunt.best and hunt.room is room:
            take(balanced(hunt, hunt.best))
    for one in [*prices.known.values()]:
        if one.memory is not None and room.headroom.left_by(one.memory):
            take(one)
    if best and len(best) < top:
        others = BestFirst(prices, room, space, top=top)
        others.run(LISTING, FARTHEST * min(one.step.seconds for one in best.values()))
        for one in others.found.values():
            take(balanced(others, one))
    return sorted(best.values(), key=lambda one: one.step.seconds)[:top]


def _rejected(prices: Prices, hunts: list[BestFirst], plans: list[Plan]) -> list[Rejected]:
    """Layouts that were priced and lost, the fastest first; one of each strategy that fits, and one that does not."""
    if not plans:
        return []
    taken = {plan.layout for plan in plans}
    nearest: dict[tuple[StrategyKey, bool], Priced] = {}
    known = (one for one in prices.known.values() if one.memory is not None)
    for one in sorted(known, key=lambda one: one.step.seconds):
        if one.workload.layout not in taken:
            fits = one.memory is None or one.memory.fits
            nearest.setdefault((one.strategy, fits), one)
    found = []
    for one in list(nearest.values())[:REJECTED]:
        plan = planned(one, plans[0].replicas)
        found.append(Rejected(plan.layout, explain.against(plan, plans[0])))
    return found
