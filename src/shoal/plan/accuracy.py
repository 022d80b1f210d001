"""The planner's error on every row of a table of published runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from math import log
from typing import Any

from shoal.facts.ledger import Ledger
from shoal.plan.published_runs import PublishedRun
from shoal.predict.memory import ledger
from shoal.predict.time.step import StepTime, step
from shoal.predict.workload import Workload

GIB = 2**30


@dataclass(frozen=True)
class AccuracyRow:
    """One published run and its prediction."""

    id: str
    source: str
    layout: str
    predicted_step_s: float
    measured_step_s: float | None  # None if it ran out of memory, or no time was published
    error: float | None  # predicted over measured, minus 1
    fits: bool
    predicted_mem_gib: float  # of the kind of memory that the row reports
    measured_mem_gib: float | None
    status: str


@dataclass(frozen=True)
class Source:
    """Errors over one source's rows with a measured time."""

    n: int
    mean_abs_error: float | None
    max_abs_error: float | None
    bias: float | None  # signed mean
    rows: int
    fit: int  # rows predicted to fit


def judged(runs: Iterable[PublishedRun]) -> list[AccuracyRow]:
    """Predict every run, also those that do not fit or that ran out of memory."""
    return [_row(run) for run in runs]


def sources(rows: Iterable[AccuracyRow]) -> dict[str, Source]:
    by_source: dict[str, list[AccuracyRow]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    return {name: _source(mine) for name, mine in by_source.items()}


def worst(rows: Iterable[AccuracyRow], count: int) -> list[AccuracyRow]:
    """The rows with the largest errors, worst first."""
    timed = [(abs(row.error), row) for row in rows if row.error is not None]
    return [row for _, row in sorted(timed, key=lambda pair: -pair[0])[:count]]


def ratios(runs: Iterable[PublishedRun], rows: Iterable[AccuracyRow]) -> list[float]:
    """The error in the ratio of two predictions, for every two layouts that one source ran with the same model, batch,
    device kind and device count.
    """
    errors = {row.id: row.error for row in rows if row.error is not None}
    alike: dict[tuple[object, ...], list[tuple[str, float]]] = {}
    for run in runs:
        if run.id in errors:
            one = run.workloads[0]
            same = run.source, one.model, one.recipe.seq, one.recipe.batch, one.cluster.devices
            alike.setdefault((*same, one.cluster.device.name), []).append((str(one.layout), errors[run.id]))
    pairs = (pair for same in alike.values() for pair in combinations(same, 2))
    return [
        abs(log((1 + mine) / (1 + others))) for (layout, mine), (other, others) in pairs if layout != other
    ]


def as_json(rows: list[AccuracyRow]) -> dict[str, Any]:
    return {
        "rows": [vars(row) for row in rows],
        "sources": {name: vars(source) for name, source in sources(rows).items()},
    }


def _row(run: PublishedRun) -> AccuracyRow:
    workload, needs, takes = _chosen(run)
    needed = needs.peak_allocated if run.memory_kind == "allocated" else needs.reserved
    return AccuracyRow(
        run.id,
        run.source,
        str(workload.layout),
        takes.seconds,
        run.seconds,
        takes.seconds / run.seconds - 1 if run.seconds else None,
        needs.fits,
        needed / GIB,
        run.memory_gib,
        run.status,
    )


def _chosen(run: PublishedRun) -> tuple[Workload, Ledger, StepTime]:
    """Fill in what a row leaves open: the fastest choice that fits; if none does, the fastest.

    The row did run: if no choice fits, the ledger is wrong, and people optimise for speed.

    Of several stacks the most likely one counts, unless only another one's run would have fitted.
    """
    asked = [(workload, ledger(workload), step(workload)) for workload in run.workloads]
    fitting = [one for one in asked if one[1].fits]
    if fitting:
        likeliest = fitting[0][0].stack
        return min((one for one in fitting if one[0].stack is likeliest), key=lambda one: one[2].seconds)
    return min((one for one in asked if one[0].stack is asked[0][0].stack), key=lambda one: one[2].seconds)


def _source(rows: list[AccuracyRow]) -> Source:
    errors = [row.error for row in rows if row.error is not None]
    fit = sum(row.fits for row in rows)
    if not errors:
        return Source(0, None, None, None, len(rows), fit)
    sizes = [abs(error) for error in errors]
    count = len(errors)
    return Source(count, sum(sizes) / count, max(sizes), sum(errors) / count, len(rows), fit)
