"""Count the kinds of measured runs: ``python -m tests.plan.kinds`` prints the table of ``plan/measured_kinds.py``."""

from __future__ import annotations

from math import exp, log
from pathlib import Path

from shoal.plan.accuracy import judged
from shoal.plan.measured_kinds import MeasuredKind
from shoal.plan.published_runs import fitted, read

TABLE = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.csv"


def counted() -> list[MeasuredKind]:
    runs = read(TABLE)
    held = [run for run in runs if run.id not in fitted(runs) and run.seconds]
    groups: dict[tuple[str, str, bool, bool, bool], list[tuple[float, float, float, float]]] = {}
    for run, row in zip(held, judged(held), strict=True):
        workload = run.workloads[0]
        layout, cluster = workload.layout, workload.cluster
        key = (run.source, cluster.device.name, layout.tp > 1, layout.pp > 1, cluster.nodes > 1)
        sizes = cluster.devices, workload.model.hidden, workload.recipe.seq
        groups.setdefault(key, []).append((abs(row.error or 0.0), *map(log, sizes)))
    return [
        MeasuredKind(
            *key,
            len(rows),
            round(sum(row[0] for row in rows) / len(rows), 3),
            *(float(f"{exp(sum(row[place] for row in rows) / len(rows)):.3g}") for place in (1, 2, 3)),
        )
        for key, rows in sorted(groups.items())
    ]


def lines() -> list[str]:
    return [
        f"    MeasuredKind({', '.join(repr(value) for value in kind)}),".replace("'", '"')
        for kind in counted()
    ]


if __name__ == "__main__":
    print("\n".join(lines()))
