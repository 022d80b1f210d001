"""Experts' load over the run: tokens sent to each, summed over layers."""

from __future__ import annotations

from shoal.report.heat_map import heat
from shoal.report.markup import Markup, chart, figure, grid
from shoal.report.numbers import percent
from shoal.report.run.curves import Chart, Drawn, made

# With more experts than this, several share a row.
MOST_ROWS = 64


def section(drawn: Drawn) -> tuple[Markup, dict[str, Chart]]:
    stretches = drawn.run.metrics.experts
    if not stretches:
        return Markup(""), {}
    experts = max(len(load) for _, _, load in stretches)
    together = -(-experts // MOST_ROWS)
    rows: list[list[float | None]] = []
    for first in range(0, experts, together):
        row: list[float | None] = []
        for _, _, load in stretches:
            total, mine = sum(load), load[first : first + together]
            # An even share is 1, whatever the number of experts.
            row.append(sum(mine) / total * len(load) / len(mine) if total and mine else None)
        rows.append(row)
    names = [
        f"expert {first}" if together == 1 else f"{first}–{min(first + together, experts) - 1}"
        for first in range(0, experts, together)
    ]
    columns = [f"steps {begin}–{end}" if end > begin else f"step {begin}" for begin, end, _ in stretches]
    values = [value for row in rows for value in row if value is not None]
    text = "Tokens per expert relative to an even share"
    text += f", from {min(values):.2f} to {max(values):.2f}; darker is more." if values else "."
    field = heat(
        rows,
        names,
        columns,
        lambda value: f"{percent(value)} of an even share",
        "Load of every expert over the steps",
        darkest=2.0,
    )
    charts = {}
    if curve := made([drawn], [drawn.field("expert_imbalance", "worst layer", 4)], zero=True):
        charts["expert_imbalance"] = curve
    more = made(
        [drawn],
        [drawn.field("router_balance", "balance", 2), drawn.field("router_z", "z", 5)],
    )
    if more:
        charts["router"] = more
    return grid(
        figure(field, "Load by expert", ["metrics.jsonl: expert_load"], text, wide=True),
        figure(
            chart("expert_imbalance", "Imbalance"),
            "Imbalance",
            ["metrics.jsonl: expert_imbalance"],
            "The busiest expert of the worst layer, relative to an even share.",
            wide=not more,
        )
        if "expert_imbalance" in charts
        else "",
        figure(
            chart("router", "Router losses"),
            "Router losses",
            ["metrics.jsonl: router_balance, router_z"],
        )
        if more
        else "",
    ), charts
