"""Cost of a run (days, GPU-hours, price, energy), and curves over GPU counts and sequence lengths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from shoal.facts.cluster import Cluster, assemble, notation
from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput
from shoal.plan.amounts import DAY, HOUR
from shoal.plan.goodput import Goodput, goodput
from shoal.plan.judge import Plan
from shoal.plan.request import PlanRequest
from shoal.plan.search import searched

# Points of a curve: below what was asked for; and upwards.
HALVINGS = 4
DOUBLINGS = 2


@dataclass(frozen=True)
class Cost:
    """The cost of a whole run, including failures, restarts and checkpoints."""

    tokens: int
    steps: int
    seconds: float
    gpu_hours: float
    cost: float | None  # at the given price
    training_seconds: float  # of the steps alone
    kwh: float | None  # devices at their rated power, without hosts, network and cooling
    goodput: Goodput | None  # None on a CPU

    @property
    def days(self) -> float:
        return self.seconds / DAY

    @property
    def tokens_per_day(self) -> float:
        return self.tokens / self.days

    def as_json(self) -> dict[str, Any]:
        lost = self.goodput.as_json() if self.goodput else None
        return {**vars(self), "days": self.days, "tokens_per_day": self.tokens_per_day, "goodput": lost}


@dataclass(frozen=True)
class Point:
    """The best plan at one point of a curve; None if nothing fits."""

    devices: int
    seq: int
    batch: int
    plan: Plan | None
    speedup: float | None = None  # tokens/s relative to the curve's first point
    efficiency: float | None = None  # tokens/s per GPU relative to the curve's best: 1 at most
    cost: Cost | None = None

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "devices": self.devices,
            "seq": self.seq,
            "batch": self.batch,
            "layout": str(plan.layout) if plan else None,
            "step_seconds": plan.step.seconds if plan else None,
            "tokens_per_s": plan.tokens_per_s if plan else None,
            "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu if plan else None,
            "mfu": plan.mfu if plan else None,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "cost": self.cost.as_json() if self.cost else None,
        }


def cost(plan: Plan, tokens: int, price: float | None = None) -> Cost:
    """The cost of a run over ``tokens``, in whole steps."""
    steps = -(-tokens // plan.workload.recipe.tokens_per_step)
    training = steps * plan.step.seconds
    lost = goodput(plan)
    seconds = training / lost.share if lost and lost.share else training
    hours = seconds * plan.world / HOUR
    power = plan.workload.cluster.device.power
    return Cost(
        tokens,
        steps,
        seconds,
        hours,
        hours * price if price is not None else None,
        training,
        hours * power / 1e3 if power else None,
        # A shorter run ends with a checkpoint anyway.
        replace(lost, checkpoint_every=min(lost.checkpoint_every, steps)) if lost else None,
    )


def best(asked: PlanRequest, runnable: bool = False) -> Plan | None:
    """The plan to run, preferably one that the engine runs; None if nothing fits.

    ``runnable``: only what the engine runs.
    """
    chosen = searched(asked.workload(Layout()), 1, runnable, asked.headroom).chosen
    return chosen.plan if chosen else None


def resized(asked: PlanRequest, devices: int) -> PlanRequest | None:
    """The same request with another device count; None if nodes would not be full."""
    cluster = with_devices(asked.cluster, devices)
    return replace(asked, cluster=cluster, layout=None) if cluster else None


def with_devices(cluster: Cluster, devices: int) -> Cluster | None:
    """More or fewer of the same devices: a part of one node, or whole nodes."""
    name = f"{devices}x{cluster.device.name}"
    if str(cluster) == f"{cluster.devices}x{cluster.device.name}":
        try:
            return notation.find(name)
        except BadInput:
            return None
    per_node = min(devices, cluster.devices_per_node)
    if devices % per_node:
        return None
    domain = min(cluster.fast_domain, devices)
    return assemble(
        name,
        cluster.device,
        devices // per_node,
        per_node,
        domain,
        cluster.fast,
        cluster.network,
        cluster.host_memory,
        cluster.host_bandwidth,
        cluster.nvme,
        max(1, cluster.nics * per_node // cluster.devices_per_node),
        cluster.across_rails,
    )


def over_devices(asked: PlanRequest) -> list[Point]:
    """Strong scaling: the same recipe on fewer and on more devices."""
    devices = asked.cluster.devices
    counts = [devices // 2**times for times in range(HALVINGS, 0, -1) if devices % 2**times == 0]
    counts += [devices * 2**times for times in range(DOUBLINGS)]
    requests = [request for count in counts if (request := resized(asked, count))]
    return _curve(requests)


def over_sequences(asked: PlanRequest) -> list[Point]:
    """Longer and shorter sequences at the same number of tokens per step, where the batch can be halved for it."""
    seq, batch = asked.recipe.seq, asked.recipe.batch
    pairs = [(seq // 2**times, batch * 2**times) for times in (2, 1) if seq % 2**times == 0]
    pairs += [(seq * 2**times, batch // 2**times) for times in range(4) if batch % 2**times == 0]
    model = asked.model
    fitting = [
        pair for pair in pairs if model.positions == "rotary" or pair[0] <= max(seq, model.max_positions)
    ]
    recipes = [asked.recipe.model_copy(update={"seq": each, "batch": count}) for each, count in fitting]
    return _curve(replace(asked, recipe=recipe, layout=None) for recipe in recipes)


def _curve(requests: Iterable[PlanRequest]) -> list[Point]:
    """Speed-up is relative to the first point that fits. Efficiency is relative to the point with the highest
    throughput per GPU: too few GPUs offload or recompute what more of them keep, and would make all others look too
    good.
    """
    answers = [(asked, best(asked)) for asked in requests]
    found = [plan for _, plan in answers if plan]
    most = max((plan.tokens_per_s_per_gpu for plan in found), default=0.0)
    points: list[Point] = []
    for asked, plan in answers:
        speedup = efficiency = None
        if plan:
            efficiency = plan.tokens_per_s_per_gpu / most
            speedup = plan.tokens_per_s / found[0].tokens_per_s
        total = cost(plan, asked.tokens, asked.price) if plan and asked.tokens else None
        recipe = asked.recipe
        points.append(
            Point(asked.cluster.devices, recipe.seq, recipe.batch, plan, speedup, efficiency, total)
        )
    return points
