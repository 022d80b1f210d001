"""Fit the planner's constants on a fifth of the published runs; show how far off it is on the rest.

    python benchmarks/fit_planner.py PUBLISHED.csv [--sweeps 20] [--leave-out SOURCE | MODEL]

Constants of device kinds and links are in ``facts/calibration/``, three of each stack in ``facts/cluster/stack.py``:
this prints what to write there. Which rows are fitted is fixed (``fitted``).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
from record import record

from shoal.facts import calibration
from shoal.facts.calibration import AttentionRates, Calibration, DeviceRates
from shoal.facts.cluster import stack
from shoal.plan.published_runs import FITTED, PublishedRun, fitted, read
from shoal.predict.time import host as hosts
from shoal.predict.time.step import CostModel, step

Constants = dict[str, float]

# Where the search starts, and between which values it may look: what a datasheet, a paper or a measurement allows. No
# overlap is free: kernels that communicate take about an eighth of the multiprocessors from those that compute.
START: dict[str, tuple[float, float, float]] = {
    "ramp": (27, 10, 400),
    "launch": (1e-06, 1e-6, 8e-6),
    "narrow": (1.0, 0.6, 1.0),
    "batched": (0.864, 0.3, 0.9),
    "A100.matmul": (0.869, 0.80, 0.95),
    "H100.matmul": (0.704, 0.65, 0.82),
    "H100-96GB.matmul": (0.575, 0.5, 0.7),
    "A100.first_flash": (0.354, 0.25, 0.6),
    "H100.first_flash": (0.245, 0.15, 0.35),
    "fast.share": (0.75, 0.73, 0.85),
    "megatron.arrival": (3.5e-05, 1e-6, 1e-4),
    "host.spread": (0.07, 0.005, 0.4),
    "host.backward": (2.1, 1.2, 2.6),
    "host.blend": (5.0, 2.5, 12.0),
    "host.head": (2.1, 0.5, 4.0),
    "host.once": (0.6, 0.5, 6.0),
    "megatron.host": (0.75e-3, 1e-4, 2e-3),
    "megatron.fusion": (0.95, 0.3, 3.0),
    "foundry.host": (0.3e-3, 5e-5, 1e-3),
    "foundry.fusion": (3.7, 0.5, 4.5),
    "foundry.overlap": (0.5, 0.01, 0.87),
    "titan.host": (0.3e-3, 5e-5, 1e-3),
    "titan.fusion": (1.6, 0.5, 3.0),
    "titan.overlap": (0.85, 0.01, 0.87),
}
# How much a source weighs, however many rows it has.
WEIGHTS = {"vtrain-single": 4.5, "vtrain-multi": 1.5, "llm-foundry": 1.0, "torchtitan": 0.7}
# A constant that the rows say little about stays near its start: what a factor of e away from it costs.
PULL = 0.0005
NUDGE = 1e-3


def device_rates(name: str, constants: Constants) -> DeviceRates:
    family = "A100" if name.startswith("A100") else "H100"
    own = constants.get(f"{name}.matmul", constants[f"{family}.matmul"])
    slower = own / constants[f"{family}.matmul"]
    base = calibration.AMPERE if family == "A100" else calibration.HOPPER
    first = constants[f"{family}.first_flash"] * slower

    def scaled(kind: AttentionRates) -> AttentionRates:
        return AttentionRates(forward=kind.forward * slower, backward=kind.backward * slower)

    return base.model_copy(
        update={
            "matmul": own,
            "flash": scaled(base.flash),
            "fused": scaled(base.fused),
            "first_flash": AttentionRates(forward=first, backward=first / 1.15),
            **{key: constants[key] for key in ("ramp", "launch", "narrow", "batched")},
        }
    )


def predictor(constants: Constants) -> Callable[[PublishedRun], float]:
    """How long a run takes, as predicted with these constants."""
    benches: dict[tuple[int, ...], CostModel] = {}
    for name in ("spread", "backward", "head", "once"):
        setattr(hosts, f"HOST_{name.upper()}", constants[f"host.{name}"])
    hosts.BLEND = constants["host.blend"]
    links = {
        kind: getattr(calibration, kind.upper()).model_copy(
            update={
                field: constants[f"{kind}.{field}"]
                for field in ("share", "hop", "start")
                if f"{kind}.{field}" in constants
            }
        )
        for kind in ("fast", "network")
    }
    stacks = {
        name: replace(
            known,
            **{
                field: constants[f"{short}.{field}"]
                for field in ("host", "arrival", "fusion", "overlap")
                if f"{short}.{field}" in constants
            },
        )
        for short, known in (
            ("megatron", stack.MEGATRON),
            ("foundry", stack.FOUNDRY),
            ("titan", stack.TITAN),
            ("titan", stack.TITAN_COMPILED),
        )
        for name in [known.name]
    }

    def predict(run: PublishedRun) -> float:
        times = []
        for workload in run.workloads:
            if workload.stack is not run.workloads[0].stack:
                continue  # the likeliest stack is what a blank cell is fitted as
            asked = replace(workload, stack=stacks[workload.stack.name])
            key = (id(workload.model), id(workload.cluster), id(workload.recipe))
            if key not in benches:
                rates = Calibration(
                    device=device_rates(workload.cluster.device.name, constants),
                    fast=links["fast"],
                    network=links["network"],
                    host=calibration.HOST,
                    known=True,
                )
                benches[key] = CostModel(
                    workload.model, workload.cluster, workload.recipe, asked.stack, rates
                )
            times.append(step(asked, benches[key]).seconds)
        return min(times)

    return predict


def errors(runs: Iterable[PublishedRun], constants: Constants) -> list[float]:
    predict = predictor(constants)
    return [log(predict(run) / run.seconds) for run in runs if run.seconds]


def fit(rows: list[PublishedRun], sweeps: int) -> Constants:
    """Least absolute errors by Levenberg and Marquardt's method: every residual is weighed by what it was, so that few
    large ones do not decide. In logarithms, so that constants of all sizes are alike."""
    names = list(START)
    first = np.log([START[name][0] for name in names])
    low, high = (np.log([START[name][place] for name in names]) for place in (1, 2))
    count = Counter(row.source for row in rows)
    share = np.array([WEIGHTS.get(row.source, 1.0) / count[row.source] for row in rows])

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.array(errors(rows, dict(zip(names, np.exp(point), strict=True))))

    def cost(found: np.ndarray, point: np.ndarray) -> float:
        return float(share @ np.abs(found) + PULL * np.sum((point - first) ** 2))

    point, damping = first, 0.1
    found = residuals(point)
    for sweep in range(sweeps):
        slope = np.stack(
            [(residuals(point + NUDGE * unit) - found) / NUDGE for unit in np.eye(len(names))], axis=1
        )
        weight = share / np.maximum(np.abs(found), 0.01)
        square = slope.T @ (weight[:, None] * slope) + 2 * PULL * np.eye(len(names))
        down = slope.T @ (weight * found) + 2 * PULL * (point - first)
        before = cost(found, point)
        for _ in range(8):
            moved = np.linalg.solve(square + damping * np.diag(np.diag(square)), -down)
            tried = np.clip(point + moved, low, high)
            after = residuals(tried)
            if cost(after, tried) < before:
                point, found, damping = tried, after, damping / 3
                break
            damping *= 4
        gained = before - cost(found, point)
        print(f"sweep {sweep}: {cost(found, point):.4f}", flush=True)
        if gained < 1e-5:
            break
    return {name: float(value) for name, value in zip(names, np.exp(point), strict=True)}


def report(runs: list[PublishedRun], constants: Constants, title: str) -> None:
    by_source: dict[str, list[float]] = defaultdict(list)
    predict = predictor(constants)
    for run in runs:
        if run.seconds:
            by_source[run.source].append(predict(run) / run.seconds - 1)
    for source, found in by_source.items():
        mean, bias = sum(map(abs, found)) / len(found), sum(found) / len(found)
        print(
            f"{title:<12}{source:<16}{len(found):>5} rows  mean {mean:6.1%}  bias {bias:+6.1%}  "
            f"worst {max(map(abs, found)):6.1%}"
        )


def cross_validate(runs: list[PublishedRun], chosen: set[str], sweeps: int) -> None:
    """What a source or a model is predicted with that no constant has seen.

    A stack without any row keeps the properties it starts with.
    """
    parts: dict[str, Callable[[PublishedRun], bool]] = {}
    for source in FITTED:
        parts[f"source {source}"] = lambda run, source=source: run.source == source
    for width in sorted({run.workloads[0].model.hidden for run in runs if run.source in FITTED}):
        parts[f"models {width} wide"] = lambda run, width=width: run.workloads[0].model.hidden == width
    for name, left_out in parts.items():
        constants = fit([run for run in runs if run.id in chosen and not left_out(run)], sweeps)
        predict = predictor(constants)
        found: dict[str, list[float]] = defaultdict(list)
        for run in runs:
            if left_out(run) and run.seconds and run.source in FITTED:
                found[run.source].append(predict(run) / run.seconds - 1)
        for source, each in found.items():
            mean, bias = sum(map(abs, each)) / len(each), sum(each) / len(each)
            print(f"without {name}: {source} {len(each)} rows, mean {mean:.1%}, bias {bias:+.1%}", flush=True)
            record(
                "planner_cross_validation", left_out=name, source=source, rows=len(each), mean=mean, bias=bias
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--first", default="", help="other rows: vtrain-single=0,vtrain-multi=1,…")
    parser.add_argument("--save", type=Path)
    parser.add_argument(
        "--cross-validate",
        action="store_true",
        help="fit again and again without one source or one model, judge those, and record it",
    )
    asked = parser.parse_args()
    runs = [run for run in read(asked.table) if run.status == "ok"]
    other = dict(pair.split("=") for pair in asked.first.split(",") if pair)
    chosen = fitted(runs, {**FITTED, **{source: int(first) for source, first in other.items()}})
    if asked.cross_validate:
        cross_validate(runs, chosen, asked.sweeps)
        return
    constants = fit([run for run in runs if run.id in chosen], asked.sweeps)
    print(json.dumps({name: float(f"{value:.3g}") for name, value in constants.items()}, indent=1))
    report([run for run in runs if run.id in chosen], constants, "fitted")
    report([run for run in runs if run.id not in chosen], constants, "not fitted")
    if asked.save:
        asked.save.write_text(json.dumps(constants, indent=1))


if __name__ == "__main__":
    main()
