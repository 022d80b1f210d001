"""Find the fastest legal layouts that fit.

Each strategy (degrees, and what data ranks shard) contributes only its fastest layout, so that a list of plans is not
one plan with ten small variations. Layouts that the engine runs are searched first on their own, then all layouts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from shoal.facts import support
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.stack import SHOAL, Stack
from shoal.facts.config import Lora, TuneSection
from shoal.facts.layout import Layout, divisors
from shoal.facts.layout.stack_limits import RULES
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.plan import explain
from shoal.plan.best_first import OTHERS, BestFirst, HuntResult, received
from shoal.plan.choose import Chosen, choose, planned
from shoal.plan.headroom import NONE, USUAL, Headroom
from shoal.plan.judge import RUNS, Plan, Replicas, replicas, supported
from shoal.plan.memory_bound import MemoryBound
from shoal.plan.orders import MergedGroups, OrderGroups
from shoal.plan.practice import usual_zero
from shoal.plan.search_process import in_other_process
from shoal.plan.space import Candidate, Space
from shoal.plan.time_bound import TimeBound
from shoal.plan.walk import Priced, StrategyKey
from shoal.predict.time.step import cost_model
from shoal.predict.workload import Workload

TOP = 10
REJECTED = 20
# Effort limit of one hunt (``plan/walk.py``). Large clusters have millions of layouts within a few percent of one
# another; a hunt that is cut off reports what it may have missed.
EFFORT = 36000
# How much slower than an offloading layout another may be before offload is preferred. Moving data to a host and back
# is one more thing that can be slow, but avoiding it has a price. Full recomputation takes at most a third longer, and
# published runs use it before they offload anything.
DEAR = 4 / 3
# Spaces with more layouts than this are searched in a second process, if there is a second core, while this process
# looks for what may be chosen: each takes about a second.
LARGE = 20_000_000
# Effort multiplier for a hunt that has found nothing that fits.
PATIENCE = 16


@dataclass(frozen=True)
class Rejected:
    """A layout that lost, and why."""

    layout: Layout
    reason: str


@dataclass
class SearchResult:
    """The result of a search."""

    plans: list[Plan]  # best first; those within the error bar of the best are marked
    rejected: list[Rejected]  # nearest first
    searched: int  # layouts in the space; all are decided if the search is complete
    evaluated: int  # of these, layouts priced one by one
    seconds: float
    complete: bool  # whether the fastest is known, or that nothing fits; otherwise see ``at_best``
    at_best: float | None = None  # lower bound on the step time of layouts that were left out
    chosen: Chosen | None = None  # the layout to run

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
    """The fastest layout of each of the ``top`` best strategies, including one that the engine runs.

    With ``top=1`` that is the fastest layout that may be chosen; faster ones may leave too little headroom.
    ``runnable``: only what the engine runs. ``devices``: how many of the cluster's to use, by default all.
    ``headroom``: what every plan leaves free; by default the chosen one leaves the usual amount, if one does.
    ``effort``: the limit in bounds; None: no limit.
    """
    started = time.perf_counter()
    asked = Workload(model, cluster, recipe, Layout(), stack, tune or TuneSection(), lora, compile)
    count_of_devices = devices or cluster.devices
    bounds = TimeBound(cost_model(asked), asked.tune, lora, count_of_devices, compile)
    most = MemoryBound(model, cluster, recipe, stack, lora, compile, headroom or NONE)
    apart = cluster.device.name != "cpu"
    ours = stack.name not in RULES  # what another stack does not run is useless
    space = Space(model, recipe, count_of_devices, runnable=ours, apart=apart, lora=lora)
    space = space if ours else replace(space, stack=stack.name)
    lists: dict[tuple[object, ...], OrderGroups] = {}
    known: dict[Candidate, Priced] = {}

    def hunted(
        room: MemoryBound, space: Space, others: int = OTHERS, patient: bool = True
    ) -> list[BestFirst]:
        """Hunt through a space. If it is cut off empty-handed, a second hunt covers frugal layouts only."""

        def hunt(space: Space) -> BestFirst:
            loosest = replace(space, apart=apart, customary=False)
            parts = [replace(loosest, short=False)] if loosest.usual else []
            parts += [replace(loosest, usual=False)] if loosest.short else []
            for part in parts:
                if part.key not in lists:
                    lists[part.key] = OrderGroups(bounds, most, part)
            groups = MergedGroups(*(lists[part.key] for part in parts))
            return BestFirst(asked, bounds, room, space, groups, top, others, known=known)

        whole = hunt(space)
        whole.run(effort)
        if not patient or effort is None or whole.accepted or whole.at_best is None:
            return [whole]
        frugal = hunt(replace(space, frugal=True))
        for one, work in ((frugal, effort // 2), (frugal, PATIENCE * effort), (whole, PATIENCE * effort)):
            if not frugal.accepted:
                one.run(work)
        frugal.at_best = None  # what it leaves out, the full hunt leaves out too
        return [whole, frugal]

    # The whole space, if requested; a very large one in a second process, alongside the hunt for what may be chosen.
    everything = replace(space, runnable=runnable and ours)
    layouts, elsewhere = everything.size(), None
    if top > 1 and layouts > LARGE:
        elsewhere = in_other_process(lambda: [hunt.found for hunt in hunted(most, everything)])
    hunts: list[BestFirst] = []
    choosing = most
    if space.runs or runnable or not ours:
        # What may be chosen. Offload only if nothing else fits or it is much faster; shorter pieces of sequences than
        # in published runs only if nothing fits; less than the usual headroom only if nothing leaves it.
        rooms = (most,) if headroom else (most.leaving(USUAL), most)
        usual = replace(space, short=False)
        ways = (replace(usual, apart=False), usual, space) if apart else (space,)
        # For another stack, its default state sharding comes before what it can be configured to do.
        if apart and usual_zero(stack) != 3:
            ways = (replace(usual, apart=False, customary=True), *ways)
        for choosing, way in product(rooms, ways):
            # The runners-up shown mostly come from the last hunt, unless there is time while the other process runs.
            hunts = hunted(choosing, way, OTHERS if elsewhere else OTHERS // 4)
            if any(hunt.accepted for hunt in hunts):
                break
    able = any(hunt.accepted for hunt in hunts)
    chosen_from = [*hunts]
    beyond = hunts
    if not able or (top > 1 and elsewhere is None):
        beyond = hunted(most, everything)
    found = [hunt.found for hunt in beyond]
    against = replicas(replace(asked, layout=Layout(dp=count_of_devices)), bounds.on)
    simpler: dict[tuple[object, ...], Priced] = {}
    if elsewhere is not None:
        if able:  # among those known so far, while the other process runs, which seldom adds candidates
            choose(asked, bounds, choosing, hunts, found, against, simpler)
        found = [received(one, asked) for one in elsewhere()]
    if not able:
        chosen_from, choosing = beyond, most
    elif apart and not hunts[0].space.apart:
        wide = replace(hunts[0].space, apart=True)
        if _seconds(found, wide) * DEAR < _seconds(hunts):
            offloading = hunted(choosing, wide)
            chosen_from = offloading if _seconds(offloading) * DEAR < _seconds(hunts) else chosen_from
    priced = len(known)
    if elsewhere is not None:
        priced += sum(len(one.accepted) + len(one.lost) for one in found)
    every = found if not elsewhere and beyond is hunts else [*(hunt.found for hunt in hunts), *found]
    plans = _ranked(every, top, against, stack is SHOAL)
    chosen = choose(asked, bounds, choosing, chosen_from, every, against, simpler)
    at_best = min((hunt.at_best for hunt in found if hunt.at_best is not None), default=None)
    return SearchResult(
        plans,
        _rejected(found, plans),
        layouts,
        priced,
        time.perf_counter() - started,
        complete=at_best is None,
        at_best=at_best,
        chosen=chosen,
    )


def searched(
    workload: Workload, top: int = TOP, runnable: bool = False, headroom: Headroom | None = None
) -> SearchResult:
    """Search for any layout of a workload but its own, on as many devices as are useful.

    A search cut off without a result is run to completion: it reports that nothing fits only when certain.
    """
    given = workload.model, workload.cluster, workload.recipe
    found: SearchResult | None = None
    for devices in usable(workload.cluster, workload.recipe.batch // workload.recipe.loss_facts.rows):
        for effort in (EFFORT, None):
            found = search(
                *given,
                top=top,
                lora=workload.lora,
                stack=workload.stack,
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
    """Device counts to plan for, best first. Devices of this machine, and processes on a CPU, may stay idle: there, as
    many as divide the batch.
    """
    if cluster.name != "local" and cluster.device.name != "cpu":
        return [cluster.devices]
    return [count for count in reversed(divisors(max(1, batch))) if count <= cluster.devices]


def _seconds(hunts: Sequence[BestFirst | HuntResult], space: Space | None = None) -> float:
    """Step time of the fastest layout found; with ``space``, of those that the engine runs and that are in it."""
    found = (one for hunt in hunts for one in hunt.accepted)
    kept = (
        one
        for one in found
        if space is None or (space.has(one.candidate) and supported(one.workload) == RUNS)
    )
    return min((one.step.seconds for one in kept), default=inf)


def _ranked(hunts: list[HuntResult], top: int, against: Replicas, ours: bool) -> list[Plan]:
    """The best of all hunts; if the engine runs none of several, the best that it runs takes the last place."""
    best: dict[StrategyKey, Priced] = {}
    for one in sorted((one for hunt in hunts for one in hunt.accepted), key=lambda one: one.step.seconds):
        best.setdefault(one.strategy, one)
    ranked = list(best.values())
    shown = ranked[:top]
    first_that_runs = next((one for one in ranked if support.runs(one.workload.layout)), None)
    if top > 1 and ours and first_that_runs is not None and first_that_runs not in shown:
        shown[-1] = first_that_runs
    plans = [planned(one, against) for one in shown]
    for plan in plans:
        plan.tie = plan.step.seconds <= plans[0].limit
    return plans


def _rejected(hunts: list[HuntResult], plans: list[Plan]) -> list[Rejected]:
    """Layouts that were priced and lost, fastest first; one per strategy that fits, and one that does not."""
    if not plans:
        return []
    taken = {plan.layout for plan in plans}
    nearest: dict[tuple[StrategyKey, bool], Priced] = {}
    losers = [one for hunt in hunts for one in (*hunt.lost, *hunt.accepted)]
    for one in sorted(losers, key=lambda one: one.step.seconds):
        if one.workload.layout not in taken:
            memory = one.memory or one.too_much
            fits = memory is None or memory.fits
            nearest.setdefault((one.strategy, fits), one)
    found = []
    for one in list(nearest.values())[:REJECTED]:
        plan = planned(one, plans[0].replicas)
        found.append(Rejected(plan.layout, explain.against(plan, plans[0])))
    return found
