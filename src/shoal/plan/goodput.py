"""Goodput: the share of a cluster's time that advances the run, after failures, restarts and checkpoints.

An interruption loses the steps since the last checkpoint and the time of a restart; checkpoints also cost time. The
interval that minimises the sum is Young's (1974), here to the order of Daly (2006); the remaining share of time is
Daly's complete model, in which interruptions also strike during restarts and checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from shoal.facts import calibration
from shoal.facts.bytes_per_parameter import bytes_per_parameter
from shoal.facts.model.parameters import adapter_parameters, parameter_count
from shoal.plan.amounts import HOUR
from shoal.plan.judge import Plan
from shoal.predict.time.offload import SLOWED
from shoal.predict.workload import Workload

# The Llama 3 Herd of Models (2024), section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 H100, of any
# cause: GPU, memory, host, network, software.
GPU_HOURS_BETWEEN = 54 * 24 * 16384 / 419
# Other published rates, relative to that one: 2.34 and 6.50 failures per thousand days of an eight-A100 node, on two
# clusters of Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters (2025).
_OF_LLAMA = 1000 * 24 * 8 / GPU_HOURS_BETWEEN
RATES = (2.34 / _OF_LLAMA, 6.50 / _OF_LLAMA)
# Seconds from the failure until steps run again, without reading the checkpoint. Assumed: with spare nodes, processes,
# groups and compiled blocks are back within minutes; Llama 3's run then comes out above the 90 % of its report.
RESTART = 300.0
# Bytes/s of shared storage per GPU: Llama 3's wrote 2 TB/s for 16,384 GPUs.
STORAGE = 2e12 / 16384
SOURCE = "failures: 419 in 54 days on 16,384 H100 (The Llama 3 Herd of Models, 2024)"


@dataclass(frozen=True)
class Goodput:
    """Goodput of a layout on a cluster, at the cheapest checkpoint interval."""

    share: float  # of the time that advances the run
    least: float  # the same at the highest and at the lowest published failure rate
    most: float
    hours_between: float  # mean hours between interruptions
    checkpoint_every: int  # steps
    checkpoint_seconds: float  # training time lost per checkpoint
    restart_seconds: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "source": SOURCE}


def goodput(plan: Plan) -> Goodput | None:
    """None for CPU processes, since published rates are for GPUs."""
    workload = plan.workload
    if workload.cluster.device.name == "cpu":
        return None
    between = GPU_HOURS_BETWEEN * HOUR / plan.world
    written = state_bytes(workload) / plan.world / STORAGE
    costs, restart = _checkpoint(workload, written), RESTART + written
    # A checkpoint waits for the previous one, so an interval shorter than writing gains nothing.
    interval = max(cheapest_interval(costs, between), written)
    every = max(1, round(interval / plan.step.seconds))
    shares = [
        useful(every * plan.step.seconds, costs, restart, between / rate)
        for rate in (1.0, RATES[1], RATES[0])
    ]
    return Goodput(shares[0], shares[1], shares[2], between / HOUR, every, costs, restart)


def in_words(found: Goodput) -> str:
    """One line for the user."""
    hours = found.hours_between
    often = f"{hours:.2g} h" if hours < 48 else f"{hours / 24:,.0f} days"
    return (
        f"{found.share:.1%} ({found.least:.1%} to {found.most:.1%} at other published failure rates): one interruption "
        f"in {often}, {found.restart_seconds / 60:.0f} minutes to restart; cheapest with checkpoint.every="
        f"{found.checkpoint_every}"
    )


def cheapest_interval(costs: float, between: float) -> float:
    """The optimal seconds between checkpoints, given their cost and the mean time between interruptions."""
    if costs >= 2 * between:
        return between
    part = costs / (2 * between)
    return math.sqrt(2 * costs * between) * (1 + math.sqrt(part) / 3 + part / 9) - costs


def useful(interval: float, costs: float, restart: float, between: float) -> float:
    """The share of time that advances the run."""
    exponent = (interval + costs) / between
    if exponent + restart / between > 700:  # beyond the range of floats, nothing ever completes
        return 0.0
    return interval / (between * math.exp(restart / between) * math.expm1(exponent))


def state_bytes(workload: Workload) -> float:
    """Bytes of a checkpoint: the trained weights as stored, and the optimizer states."""
    network = workload.network
    trained = (
        sum(parameter.size for parameter in adapter_parameters(network))
        if workload.lora is not None
        else parameter_count(network)
    )
    hold = bytes_per_parameter(workload.recipe, workload.stack)
    return trained * (max(hold.weight, hold.master) + hold.moments)


def _checkpoint(workload: Workload, written: float) -> float:
    """Training time lost to one checkpoint: the copy to host memory, and the slowdown while it is written."""
    link = calibration.node_rates(workload.cluster, calibration.find(workload.cluster)).link
    return state_bytes(workload) / workload.layout.world / link + SLOWED * written
