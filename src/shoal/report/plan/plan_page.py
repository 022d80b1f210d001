"""``shoal plan --html``: every layout a point, the best few in detail, curves, cost, ranks on nodes. Needs no torch.

What the page shows for other numbers of GPUs, batches and sequence lengths was precomputed by the planner
(``plan/landscape.py``); ``assets/plan.js`` only looks it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from shoal import __version__
from shoal.facts.layout import RECOMPUTES
from shoal.facts.layout.ranks import AXES
from shoal.facts.model.parameters import parameter_count
from shoal.plan.compare import Compared
from shoal.plan.decide import duration
from shoal.plan.goodput import in_words
from shoal.plan.landscape import ANY, Cell
from shoal.plan.report import PlanReport
from shoal.plan.scale import Point, over_devices, over_sequences
from shoal.report.bars import HELD, SPENT
from shoal.report.markup import (
    Markup,
    chart,
    code,
    figure,
    folded,
    grid,
    joined,
    listed,
    navigation,
    paragraph,
    section,
    table,
)
from shoal.report.numbers import count, number, percent, size
from shoal.report.page import CHARTS, page

SOURCE = "plan --json"


def plan_page(found: PlanReport, cells: Sequence[Cell], compared: Sequence[Compared] = ()) -> str:
    """The whole answer as a page. All user input is escaped."""
    asked = found.asked
    devices = found.over_devices or over_devices(asked)
    sequences = found.over_sequences or over_sequences(asked)
    sections = [
        section("Layouts", _controls(cells), _layouts(found)),
        section("The best few", _best()),
        section("Ranks on nodes and devices", _ranks()),
        section("Scaling", _curves(devices, sequences)),
        section("Clusters side by side", _compared(compared)),
        section("Cost", _cost(found)),
        section("Why", _why(found)),
    ]
    title = f"{asked.model.name} on {asked.cluster}"
    body = joined(
        [
            _head(found, title),
            navigation(sections),
            Markup("<main>"),
            *sections,
            Markup("</main>"),
            _foot(found),
        ]
    )
    data = {
        "charts": {**_chart("devices", devices), **_chart("sequences", sequences)},
        "cells": {cell.key: cell.content for cell in cells},
        "asked": {"devices": asked.cluster.devices, "batch": asked.recipe.batch, "seq": asked.recipe.seq},
        "recomputes": list(RECOMPUTES),
        "axes": list(AXES),
        "held": HELD,
        "spent": SPENT,
        "priced": asked.price is not None,
    }
    return page(f"{title} · Shoal", body, data, (*CHARTS, "plan.js"))


def _head(found: PlanReport, title: str) -> Markup:
    asked = found.asked
    recipe = asked.recipe
    words = (
        f"<strong>{escape(asked.model.name)}</strong> ({count(parameter_count(asked.model))} parameters), "
        f"{recipe.batch:,} sequences of {recipe.seq:,} tokens per step, {escape(recipe.precision)}, "
        f"on {escape(str(asked.cluster))}"
    )
    number_ = paragraph(found.number.text, "lead") if found.number else ""
    return Markup(
        f'<header class="top"><p class="kicker">Shoal · plan</p><h1>{escape(title)}</h1><p class="lead">{words}.</p>'
        f"{_decision(found.decision.text)}{number_}</header>"
    )


def _decision(text: str) -> Markup:
    """What to run in bold, then why."""
    what, stop, why = text.partition(". ")
    return paragraph(Markup(f"<strong>{escape(what + stop.strip())}</strong> {escape(why)}"), "decision")


def _controls(cells: Sequence[Cell]) -> Markup:
    """One select per dimension; values without a cell in the grid are not offered."""
    own = cells[0]
    rows = (
        ("GPUs", "devices", sorted({cell.devices for cell in cells}), own.devices),
        ("sequences per step", "batch", sorted({cell.batch for cell in cells}), own.batch),
        ("tokens per sequence", "seq", sorted({cell.seq for cell in cells}), own.seq),
        ("recomputation", "recompute", [ANY, *RECOMPUTES], ANY),
    )
    parts = []
    for words, name, values, now in rows:
        buttons = "".join(
            f'<button type="button" data-set="{name}" data-value="{value}" aria-pressed="{str(value == now).lower()}">'
            f"{f'{value:,}' if isinstance(value, int) else value}</button>"
            for value in values
        )
        parts.append(f'<span>{words}<span class="choice">{buttons}</span></span>')
    return Markup(f'<div class="controls">{"".join(parts)}</div>')


def _layouts(found: PlanReport) -> Markup:
    text = (
        f"Of {found.searched:,} possible layouts, the page draws all that the search kept and some of every strategy. "
        "The line is the frontier: no layout on the page is both faster and smaller. Grey layouts do not fit."
    )
    content = Markup(
        '<dl class="tiles" id="tiles"></dl><div id="points" class="points"></div>'
        '<p class="note" id="told" aria-live="polite">Point at or tap a layout to see what it is.</p>'
    )
    return figure(content, "Memory against throughput", [f"{SOURCE}: plans, rejected"], text)


def _best() -> Markup:
    return grid(
        figure(
            Markup('<div id="memories"></div>'),
            "Memory ledgers",
            [f"{SOURCE}: plans[].memory"],
            "What the fullest rank holds at the peak of a step, plus the device's context and fragmentation at its "
            "90th percentile. The red line is the device's memory.",
            wide=True,
        ),
        figure(Markup('<div id="times"></div>'), "Parts of a step", [f"{SOURCE}: plans[].step"], wide=True),
        figure(
            Markup('<div id="rows" class="scroll"></div>'), "In numbers", [f"{SOURCE}: plans[]"], wide=True
        ),
        figure(
            Markup(code(" ", copy=True).replace("<pre>", '<pre id="command">')),
            "The command",
            [f"{SOURCE}: plans[].command"],
            "For the first layout: writes a config and trains with it.",
            wide=True,
        ),
    )


def _ranks() -> Markup:
    text = (
        "Ranks of the first layout, node by node. Shades show each rank's place along the chosen axis; outlined ranks "
        "form a group with rank 0. Calls and bytes are per rank and step; exposed time is what computation does not "
        "hide."
    )
    return figure(
        Markup(
            '<div class="controls" id="axes"></div><div id="map" class="map"></div>'
            '<div id="groups" class="scroll"></div>'
        ),
        "Who communicates with whom",
        [f"{SOURCE}: plans[].degrees, plans[].traffic"],
        text,
    )


def _curves(devices: Sequence[Point], sequences: Sequence[Point]) -> Markup:
    return grid(
        _curve("devices", "Strong scaling", "The same global batch on fewer and on more GPUs.", devices),
        _curve("sequences", "Sequence length", "Same GPUs, same tokens per step.", sequences),
    )


def _curve(name: str, title: str, text: str, points: Sequence[Point]) -> Markup:
    known = [point for point in points if point.plan]
    if len(known) < 2:
        return Markup("")
    rows = [
        (
            f"{point.devices:,}" if name == "devices" else f"{point.seq:,} × {point.batch:,}",
            str(point.plan.layout) if point.plan else "nothing fits",
            number(point.plan.tokens_per_s_per_gpu) if point.plan else "–",
            percent(point.efficiency) if point.efficiency is not None else "–",
            duration(point.cost.seconds) if point.cost else "–",
        )
        for point in points
    ]
    titles = (
        "GPUs" if name == "devices" else "tokens × sequences",
        "layout",
        "tokens/s/GPU",
        "efficiency",
        "run",
    )
    content = joined(
        [chart(name, title), folded("Each point's layout", table(titles, rows, numbers=(2, 3, 4)))]
    )
    return figure(content, title, [f"{SOURCE}: curve.{name}"], text)


def _chart(name: str, points: Sequence[Point]) -> dict[str, Any]:
    known = [point for point in points if point.plan]
    if len(known) < 2:
        return {}
    xs = [point.devices if name == "devices" else point.seq for point in known]
    rates = [point.plan.tokens_per_s_per_gpu for point in known if point.plan]
    series = [{"name": "tokens/s/GPU", "colour": 1, "x": {"own": xs}, "y": rates, "points": True}]
    if name == "devices":
        best = [max(rates)] * len(xs)
        series.append(
            {"name": "at the best point's rate", "colour": 6, "x": {"own": xs}, "y": best, "dash": True}
        )
    return {
        name: {
            "series": series,
            "x": "own",
            "xlabel": "GPUs" if name == "devices" else "tokens per sequence",
            "xformat": "whole",
            "xlog": True,
            "zero": True,
            "format": "count",
        }
    }


def _compared(rows: Sequence[Compared]) -> Markup:
    if not rows:
        return Markup("")
    told = []
    for row in rows:
        plan, total = row.plan, row.cost
        numbers = (
            plan.tokens_per_s_per_gpu if plan else None,
            row.tokens_per_day,
            total.days if total else None,
            total.gpu_hours if total else None,
            total.cost if total else None,
            total.kwh if total else None,
        )
        layout = str(plan.layout) if plan else "nothing fits"
        told.append((str(row.found.asked.cluster), *map(number, numbers), layout))
    titles = ("cluster", "tokens/s/GPU", "tokens/day", "days", "GPU-hours", "cost", "kWh", "layout")
    return figure(table(titles, told, numbers=range(1, 7)), "The choice on each", [f"{SOURCE}: compared"])


def _cost(found: PlanReport) -> Markup:
    total = found.cost(found.choice) if found.choice else None
    if total is None:
        return Markup("")
    rows = [
        ("tokens", f"{total.tokens:,}"),
        ("steps", f"{total.steps:,}"),
        ("time", duration(total.seconds)),
        ("of which training", duration(total.training_seconds)),
        ("GPU-hours", f"{total.gpu_hours:,.0f}"),
    ]
    rows += [("cost", f"{total.cost:,.0f}")] if total.cost is not None else []
    rows += [("GPU energy", f"{total.kwh:,.0f} kWh")] if total.kwh is not None else []
    rows += [("goodput", in_words(total.goodput))] if total.goodput else []
    rows += [(verdict.what, verdict.text) for verdict in found.verdicts]
    return figure(table(("", ""), rows, style="names"), "The whole run", [f"{SOURCE}: plans[].cost"])


def _why(found: PlanReport) -> Markup:
    measurement = Markup("")
    if found.measurement is not None:
        measurement = joined([paragraph(found.measurement.text), code(found.measurement.command, copy=True)])
    return grid(
        _card("The decision", listed(found.decision.reasons), "decision.reasons"),
        _card("What would change it", measurement, "measurement"),
        _card("What would make it fit", listed(map(str, found.remedies)), "remedies"),
        _card("Not covered by published runs (wider error bar)", listed(found.unmeasured), "unmeasured"),
        _card(
            "Runners-up",
            table(("layout", "why not"), [(layout, reason) for layout, reason in found.rejected]),
            "rejected",
            wide=True,
        ),
    )


def _card(title: str, content: Markup, field: str, wide: bool = False) -> Markup:
    return figure(content, title, [f"{SOURCE}: {field}"], wide=wide) if content else Markup("")


def _foot(found: PlanReport) -> Markup:
    capacity = size(found.asked.cluster.device.memory_bytes)
    return Markup(
        f"<footer>Made by Shoal {escape(__version__)}. Searched {found.searched:,} layouts in {found.seconds:.2f} s; a "
        f"device has {capacity}. All times and sizes are predictions. Self-contained: the page loads nothing. Curves "
        "by uPlot (MIT)."
        "</footer>"
    )
