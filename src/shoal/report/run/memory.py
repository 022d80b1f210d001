"""Memory: the ledger predicted and measured, by rank, and the peak over the steps."""

from __future__ import annotations

from typing import Any

from shoal.facts.ledger import CATEGORIES, PART_OF
from shoal.report.bars import HELD, Bar, numbers_of, stacked
from shoal.report.columns import is_number
from shoal.report.heat_map import heat
from shoal.report.markup import Markup, chart, empty, figure, grid
from shoal.report.numbers import size
from shoal.report.run.curves import Chart, Drawn, made
from shoal.report.run_files import RunFiles, lookup

# Up to this many ranks get a bar each; more become cells of a heat map.
FEW = 16


def ledger_parts(found: Any) -> dict[str, float]:
    """Bytes by category; what is tracked separately is part of one."""
    parts = dict.fromkeys(CATEGORIES, 0.0)
    for name, value in found.items() if isinstance(found, dict) else ():
        kind = PART_OF.get(name, name)
        if kind in parts and is_number(value):
            parts[kind] += value
    return parts


def bars(run: RunFiles) -> list[tuple[Bar, str]]:
    """Predicted first, then measured, each with the field it comes from."""
    found = []
    if is_number(lookup(run.plan, "memory", "peak_allocated")):
        memory = run.plan["memory"]
        bar = Bar("predicted", ledger_parts(memory), memory["peak_allocated"])
        found.append((bar, "plan.json: memory"))
    if fullest := max(run.observed, key=lambda one: _number(one, "peak"), default=None):
        rank = int(fullest["rank"])
        bar = Bar(
            f"measured, rank {rank}", ledger_parts(fullest.get("peak_by_category")), _number(fullest, "peak")
        )
        found.append((bar, f"observed/rank-{rank:05d}.json: peak_by_category"))
    if is_number(lookup(run.profile, "measured", "memory", "peak_allocated")):
        memory = run.profile["measured"]["memory"]
        bar = Bar("measured by shoal profile", ledger_parts(memory), memory["peak_allocated"])
        found.append((bar, "profile.json: measured.memory"))
    return found


def section(drawn: Drawn) -> tuple[Markup, dict[str, Chart]]:
    run = drawn.run
    charts = {}
    if curve := made(
        [drawn],
        [drawn.field("memory_peak", "peak, rank 0", 4, exact=True)],
        format="bytes",
        zero=True,
    ):
        charts["memory_peak"] = curve
    means = str(run.manifest.get("memory_peak", ""))[:200]
    means = means[:1].upper() + means[1:]
    over_steps = (
        figure(
            chart("memory_peak", "Peak memory"),
            "Peak over the run",
            ["metrics.jsonl: memory_peak"],
            f"{means}." if means else "",
        )
        if charts
        else ""
    )
    return grid(_ledger(run), _by_rank(run), over_steps), charts


def _ledger(run: RunFiles) -> Markup:
    found = bars(run)
    if not found:
        return empty("This run has no plan.json with a memory ledger.")
    capacity = lookup(run.plan, "memory", "capacity")
    every = [bar for bar, _ in found]
    limit = float(capacity) if is_number(capacity) else None
    text = "Tensors on the fullest rank at the peak of a step."
    if limit is not None:
        text += f" Device memory: {size(limit)}."
    if len(found) == 1:
        text += " To see it next to a measurement, set run.observe = true or run shoal profile."
    compared = (0, 1) if len(every) > 1 else None
    content = stacked(every, HELD, size, limit) + numbers_of(every, HELD, size, compared)
    return figure(Markup(content), "Memory ledger", [source for _, source in found], text, wide=True)


def _by_rank(run: RunFiles) -> Markup:
    seen = run.observed
    if len(seen) < 2:
        return Markup("")
    step = seen[0].get("step", "?")
    text = f"Each rank at its own peak, in step {step}."
    sources = ["observed/rank-*.json: peak, peak_by_category"]
    if len(seen) <= FEW:
        each = [
            Bar(f"rank {int(one['rank'])}", ledger_parts(one.get("peak_by_category")), _number(one, "peak"))
            for one in seen
        ]
        return figure(stacked(each, HELD, size), "By rank", sources, text)
    across = lookup(run.manifest, "cluster", "devices_per_node")
    wide = int(across) if is_number(across) and 1 < across <= 64 else 8
    rows = [
        [_number(one, "peak") for one in seen[place : place + wide]] for place in range(0, len(seen), wide)
    ]
    names = [f"rank {int(seen[place]['rank'])}" for place in range(0, len(seen), wide)]
    columns = [f"+{place}" for place in range(wide)]
    peaks = [_number(one, "peak") for one in seen]
    text += f" From {size(min(peaks))} to {size(max(peaks))}."
    return figure(heat(rows, names, columns, size, "Peak memory of every rank"), "By rank", sources, text)


def _number(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if is_number(value) and value is not None else 0.0
