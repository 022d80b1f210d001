"""The single measurement that would change a decision: an assumption about links, kernels or memory, how far off it
must be for another layout to win, and the command that measures it.

Every layout in question is priced again with a changed quantity, so the answer is what the planner would decide with
that measurement. Of the quantities that change the decision, the one most likely to be that far off is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.facts import calibration
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.devices import Link
from shoal.plan.choose import Chosen, replicas_only
from shoal.plan.explain import GIB
from shoal.plan.judge import Plan
from shoal.predict.time.step import cost_model, step

# The largest factor by which a quantity is assumed to be off, in either direction.
FURTHEST = 4.0
# Memory is predicted within a few percent: with more room than this there is no doubt.
FULLEST = 1.2
EASILY_HELD = 1.05
# Bisection steps for the point where a decision changes, and the number of rival layouts.
HALVINGS = 6
RIVALS = 4


@dataclass(frozen=True)
class Measurement:
    """What to measure. ``factor``: how far off it must be; None if no plausible value changes the decision."""

    what: str
    text: str
    command: str
    factor: float | None = None
    instead: str | None = None  # the layout that would be chosen, if known

    def as_json(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True)
class Quantity:
    """An assumed quantity, and the factor by which it may easily be off."""

    what: str
    easily: float
    command: str
    value: Callable[[Cluster], float]  # in GB/s or TFLOP/s
    unit: str
    changed: Callable[[Cluster, float], Cluster]


def decisive(chosen: Chosen, plans: Sequence[Plan]) -> Measurement | None:
    """None on a CPU, where every process is a replica, and for what the engine does not run."""
    plan = chosen.plan
    if replicas_only(plan.workload.cluster) or not plan.runs:
        return None
    known = (
        each for each in (chosen.fastest, *plans) if each.layout != plan.layout and each.fits and each.runs
    )
    # Layouts already faster beyond their error bar were rejected for other reasons, which no measurement changes.
    open_to = {str(each.layout): each for each in known if plan.step.seconds <= each.limit}
    rivals = list(open_to.values())[:RIVALS]
    found = [_memory(plan, rivals), *(_flips(each, plan, rivals) for each in _quantities(plan))]
    ranked = sorted((pair for pair in found if pair), key=lambda pair: pair[0])
    if ranked:
        return ranked[0][1]
    return Measurement(
        "nothing",
        f"No rate of links or kernels within {FURTHEST:g} times of what is assumed, and no reading of memory, changes "
        "this decision.",
        "shoal profile --calibrate",
    )


def _quantities(plan: Plan) -> list[Quantity]:
    """Unmeasured quantities that a layout's time depends on."""
    cluster = plan.workload.cluster
    known = calibration.find(cluster)
    found = []
    if not known.links:
        across = (
            f"torchrun --nnodes {min(cluster.nodes, 4)} --nproc-per-node {cluster.devices_per_node} "
            "--rdzv-backend c10d --rdzv-endpoint HOST:29500 -m shoal bench comm"
        )
        # A fast link may join the nodes of a rack; the network only matters beyond it.
        if cluster.devices > cluster.fast_domain and cluster.nodes > 1:
            found.append(_link("network", across, cluster.network.kind))
        if cluster.fast is not None and cluster.fast_domain > 1:
            within = "shoal bench comm" if cluster.fast_domain <= cluster.devices_per_node else across
            found.append(_link("fast", within, cluster.fast.kind))
    if known.measured is None:
        found.append(
            Quantity(
                f"matrix products of {cluster.device.name}",
                1.1,
                "shoal profile --calibrate",
                lambda one: (
                    (one.device.peak(plan.workload.recipe.precision) or 0.0) / 1e12 * known.device.matmul
                ),
                "TFLOP/s",
                _other_peaks,
            )
        )
    return found


def _link(name: str, command: str, kind: str) -> Quantity:
    def value(cluster: Cluster) -> float:
        link: Link = getattr(cluster, name)
        rates: calibration.LinkRates = getattr(calibration.find(cluster), name)
        return rates.reached(link.bandwidth) / 1e9

    def changed(cluster: Cluster, factor: float) -> Cluster:
        link: Link = getattr(cluster, name)
        other = link.model_copy(update={"bandwidth": link.bandwidth * factor})
        return cluster.model_copy(update={name: other})

    return Quantity(f"the bandwidth of {kind}", 1.5, command, value, "GB/s", changed)


def _other_peaks(cluster: Cluster, factor: float) -> Cluster:
    peaks = {precision: rate * factor for precision, rate in cluster.device.peaks.items()}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"peaks": peaks})})


def _flips(quantity: Quantity, plan: Plan, rivals: Sequence[Plan]) -> tuple[float, Measurement] | None:
    """The factor nearest to 1 at which a rival is faster by more than its error bar, and how likely that is."""
    nearest: tuple[float, Plan] | None = None
    for rival in rivals:
        for furthest in (1 / FURTHEST, FURTHEST):
            if _wins(rival, plan, quantity, furthest):
                factor = _between(rival, plan, quantity, furthest)
                if nearest is None or abs(math.log(factor)) < abs(math.log(nearest[0])):
                    nearest = factor, rival
    if nearest is None:
        return None
    factor, rival = nearest
    cluster = plan.workload.cluster
    now = quantity.value(cluster)
    word = "below" if factor < 1 else "above"
    text = (
        f"{quantity.what[0].upper()}{quantity.what[1:]}: {word} {_number(now * factor)} {quantity.unit} "
        f"({_number(now)} assumed) {rival.layout} would be faster by more than its error bar."
    )
    easily = abs(math.log(factor)) / math.log(quantity.easily)
    return easily, Measurement(quantity.what, text, quantity.command, factor, str(rival.layout))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _between(rival: Plan, plan: Plan, quantity: Quantity, furthest: float) -> float:
    low, high = 0.0, math.log(furthest)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _wins(rival, plan, quantity, math.exp(middle)):
            high = middle
        else:
            low = middle
    return math.exp(high)


def _wins(rival: Plan, plan: Plan, quantity: Quantity, factor: float) -> bool:
    cluster = quantity.changed(plan.workload.cluster, factor)
    seconds = []
    for each in (rival, plan):
        workload = replace(each.workload, cluster=cluster)
        seconds.append(step(workload, cost_model(workload)).seconds)
    return seconds[0] * (1 + rival.error_bar) < seconds[1]  # as Plan.limit


def _memory(plan: Plan, rivals: Sequence[Plan]) -> tuple[float, Measurement] | None:
    """How much more memory the chosen one may take before it no longer fits, if that is plausible."""
    memory = plan.memory
    factor = memory.capacity / memory.device_p90
    if factor > FULLEST:
        return None
    smaller = [each for each in rivals if each.memory.device_p90 < memory.device_p90]
    then = f"; then {smaller[0].layout}" if smaller else ""
    text = (
        f"Memory: if the fullest rank reaches more than {memory.capacity / GIB:.1f} GiB "
        f"({memory.device_p90 / GIB:.1f} predicted), this layout does not fit{then}."
    )
    save, trained, _ = plan.command.partition(" && ")
    command = f"{save} && shoal dryrun plan.toml" if trained else save  # another stack has its own tools
    instead = str(smaller[0].layout) if smaller else None
    return math.log(factor) / math.log(EASILY_HELD), Measurement("memory", text, command, factor, instead)
