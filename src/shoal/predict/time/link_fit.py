"""Fit latency and bandwidth to measured collectives: per operation, and for the link rates that the planner uses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.facts.calibration import LinkRates
from shoal.predict.time.links import ROUNDS

# The most frequent collectives of a training step, to which a link's rates are fitted.
PRICED = ("all_reduce", "all_gather", "reduce_scatter", "send")


class TimedCollective(NamedTuple):
    """One timed operation: its largest buffer in bytes, and the number of ranks."""

    op: str
    ranks: int
    bytes: int
    seconds: float

    @property
    def algorithm_bandwidth(self) -> float:
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        return self.bytes * bus_share(self.op, self.ranks) / self.seconds


def bus_share(op: str, ranks: int) -> float:
    """The part of a call's largest buffer that passes a rank's link in one direction, with a ring."""
    others = (ranks - 1) / ranks
    return {"all_reduce": 2 * others, "send": 1.0, "broadcast": 1.0, "reduce": 1.0}.get(op, others)


@dataclass(frozen=True)
class OperationFit:
    """Seconds = latency + bytes on the bus / bandwidth."""

    op: str
    ranks: int
    latency: float
    bandwidth: float  # bytes/s on the bus
    worst: float  # the largest relative error of the fit

    def seconds(self, size: int) -> float:
        return self.latency + size * bus_share(self.op, self.ranks) / self.bandwidth


def fit_operation(calls: Sequence[TimedCollective]) -> OperationFit:
    """Fit one operation with the least relative error, so that small messages determine the latency as much as large
    ones the bandwidth. Neither is negative; with a single size, all of its time is bandwidth."""
    op, ranks = calls[0].op, calls[0].ranks
    moved = [call.bytes * bus_share(op, ranks) for call in calls]
    weights = [1 / call.seconds**2 for call in calls]
    middle = _mean(moved, weights)
    time = _mean([call.seconds for call in calls], weights)
    spread = sum(weight * (x - middle) ** 2 for weight, x in zip(weights, moved, strict=True))
    slope = sum(
        weight * (x - middle) * (call.seconds - time)
        for weight, x, call in zip(weights, moved, calls, strict=True)
    )
    per_byte = slope / spread if spread else 0.0
    latency = time - per_byte * middle
    if latency < 0 or per_byte <= 0:  # noise; fit through the origin
        latency = 0.0
        squares = sum(weight * x * x for weight, x in zip(weights, moved, strict=True))
        products = sum(
            weight * x * call.seconds for weight, x, call in zip(weights, moved, calls, strict=True)
        )
        per_byte = products / squares
    fit = OperationFit(op, ranks, latency, 1 / per_byte, 0.0)
    worst = max(abs(fit.seconds(call.bytes) / call.seconds - 1) for call in calls)
    return OperationFit(op, ranks, latency, 1 / per_byte, worst)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def fit_operations(calls: Sequence[TimedCollective]) -> dict[str, OperationFit]:
    return {
        op: fit_operation([call for call in calls if call.op == op])
        for op in dict.fromkeys(call.op for call in calls)
    }


def link_rates(calls: Sequence[TimedCollective], source: str) -> LinkRates | None:
    """The link rates between these ranks, as ``predict/time/links.py`` uses them; None if measurements are missing.

    A latency is one start plus one hop for each rank passed: an all-reduce passes each rank twice.
    """
    fits = fit_operations(calls)
    if len({call.bytes for call in calls}) < 2 or not set(PRICED) <= fits.keys():
        return None
    ranks = calls[0].ranks
    latency = {op: fits[op].latency for op in PRICED}
    passes = {op: ROUNDS.get(op, 1.0) * (ranks - 1 if op in ROUNDS else 1) for op in PRICED}
    between = passes["all_reduce"] - passes["all_gather"]
    hop = max(0.0, (latency["all_reduce"] - latency["all_gather"]) / between)
    start = max(0.0, statistics.median(latency[op] - passes[op] * hop for op in PRICED))
    bandwidth = statistics.median(fits[op].bandwidth for op in PRICED)
    # gloo reduces whole buffers for a reduce-scatter: twice a ring's bytes, which its own bandwidth shows and the
    # others' hides.
    reached = {op: fits[op].bandwidth / bandwidth for op in (*PRICED, "all_to_all") if op in fits}
    return LinkRates(share=1.0, hop=hop, start=start, bandwidth=bandwidth, operations=reached, source=source)
