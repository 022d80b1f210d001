"""``report.html``: everything in a run directory on one page; several runs side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.report.bars import HELD, stacked
from shoal.report.events import FAULT, LAYOUT, RESTART, RunEvent, events
from shoal.report.markup import (
    Markup,
    chip,
    empty,
    figure,
    folded,
    joined,
    navigation,
    paragraph,
    section,
    table,
    tiles,
)
from shoal.report.numbers import count, duration, moment, size
from shoal.report.page import page
from shoal.report.run import curves, data, experts, memory, pipeline, reproduce, samples, step_time, traffic
from shoal.report.run.curves import Chart, Drawn
from shoal.report.run.differences import differences
from shoal.report.run.summary import RunSummary, said, summary
from shoal.report.run_files import EARLY, FAILED, FINISHED, LOST, RUNNING, RunFiles, read_run

KINDS = {FINISHED: "good", RUNNING: "live", EARLY: "good", FAILED: "bad", LOST: "bad"}
EVENTS = {FAULT: "bad", RESTART: "warn", LAYOUT: "layout"}
MOST_EVENTS = 300
CONTROLS = Markup(
    '<div class="controls"><span>x axis<span class="choice">'
    '<button type="button" data-x="step" aria-pressed="true">steps</button>'
    '<button type="button" data-x="tokens" aria-pressed="false">tokens</button>'
    '<button type="button" data-x="hours" aria-pressed="false">hours</button></span></span>'
    '<span class="choice"><button type="button" data-log="loss grad_norm lr" aria-pressed="false">log scale</button>'
    "</span><span>Drag across a chart to zoom in; double-click to zoom out.</span></div>"
)


def report_page(paths: Sequence[Path]) -> tuple[str, list[RunSummary]]:
    """The page, and the runs' summaries. Raises BadInput if a path holds no run."""
    runs = [read_run(path) for path in paths]
    happened = [events(run) for run in runs]
    drawn = [
        Drawn(run, told, number, len(runs))
        for number, (run, told) in enumerate(zip(runs, happened, strict=True))
    ]
    found = [summary(run, told) for run, told in zip(runs, happened, strict=True)]
    body, charts = _alone(drawn[0], found[0]) if len(runs) == 1 else _together(drawn, found)
    title = found[0].name if len(runs) == 1 else " · ".join(one.name for one in found)
    return page(f"{title} · Shoal", body, {"charts": charts}), found


def _alone(drawn: Drawn, found: RunSummary) -> tuple[Markup, dict[str, Chart]]:
    sections, charts = sections_of(drawn)
    run = drawn.run
    head = Markup(
        f'<header class="top"><p class="kicker">Shoal · run report</p>'
        f"<h1>{escape(found.name)} {chip(found.state, KINDS.get(found.state, ''))}</h1>"
        f'<p class="lead">{_lead(run, found)}</p>{tiles(found.tiles())}{_warnings(run)}</header>'
    )
    return joined(
        [head, navigation(sections), Markup("<main>"), *sections, Markup("</main>"), _footer()]
    ), charts


def sections_of(drawn: Drawn) -> tuple[list[Markup], dict[str, Chart]]:
    run, charts = drawn.run, dict[str, Chart]()
    parts: dict[str, Markup] = {}
    for name, (markup, more) in {
        "training": curves.training([drawn]),
        "throughput": curves.throughput([drawn]),
        "memory": memory.section(drawn),
        "time": step_time.section(drawn),
        "experts": experts.section(drawn),
    }.items():
        parts[name] = markup
        charts |= more
    nothing = empty("No step has been recorded yet. Once there are some, write the report again.")
    return [
        section("Training", CONTROLS if parts["training"] else "", parts["training"] or nothing),
        section("Events", _events(run, drawn.events)),
        section("Throughput", parts["throughput"]),
        section("Memory", parts["memory"]),
        section("Step time", parts["time"]),
        section("Pipeline", pipeline.section(run)),
        section("Traffic", traffic.section(run)),
        section("Experts", parts["experts"]),
        section("Data", data.section(run)),
        section("Samples", samples.section(run)),
        section("Reproduce", reproduce.section(run)),
    ], charts


def _lead(run: RunFiles, found: RunSummary) -> str:
    parts = []
    if found.model:
        size_ = f" ({count(found.parameters)} parameters)" if found.parameters else ""
        parts.append(f"<strong>{escape(found.model)}</strong>{size_}")
    if found.layout:
        ranks = f" on {found.world} rank{'s' * (found.world != 1)}" if found.world else ""
        parts.append(f"<code>{escape(found.layout)}</code>{ranks}")
    if started := run.manifest.get("started"):
        parts.append(f"last started {escape(moment(str(started)))}")
    return ", ".join(parts) or "This run has no manifest.json, so little is known about it."


def _warnings(run: RunFiles) -> Markup:
    told = list(run.notes)
    if run.state == RUNNING:
        told.insert(0, "This run is still going on: the page shows what was recorded when the page was made.")
    if run.state == LOST:
        told.insert(
            0, "The launcher of this run died without leaving a message. The same command continues the run."
        )
    version = run.manifest.get("shoal")
    if isinstance(version, str) and version != __version__:
        told.append(
            f"The run was made by Shoal {version}, this page by {__version__}: what it did not record is missing."
        )
    return Markup("".join(paragraph(one, "decision warning") for one in told))


def _events(run: RunFiles, happened: list[RunEvent]) -> Markup:
    if not happened:
        return empty("No faults, no restarts, no layout changes.") if run.metrics.steps else Markup("")
    rows = [
        (
            f"{one.step:,}",
            chip(one.what, EVENTS.get(one.kind, "")),
            "" if one.rank is None else str(one.rank),
            one.text,
            one.when,
        )
        for one in happened[:MOST_EVENTS]
    ]
    more = f" The first {MOST_EVENTS} of {len(happened):,}." if len(happened) > MOST_EVENTS else ""
    content = table(("step", "event", "rank", "message", "time (UTC)"), rows, numbers=(0,))
    sources = sorted({one.source for one in happened})
    return figure(content, "What happened", sources, f"Each is marked on the charts at its step.{more}")


def _together(drawn: Sequence[Drawn], found: Sequence[RunSummary]) -> tuple[Markup, dict[str, Chart]]:
    training, charts = curves.training(drawn)
    throughput, more = curves.throughput(drawn)
    columns = [said(one) for one in found]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    numbers = table(("", *(one.name for one in found)), rows, style="names")
    held = [bar for one in drawn for bar in _named(one, memory.bars(one.run))]
    spent = [bar for one in drawn for bar in _named(one, step_time.bars(one.run))]
    sections = [
        section(
            "In numbers", figure(numbers, "Side by side", ["metrics.jsonl", "manifest.json", "plan.json"])
        ),
        section("Curves", CONTROLS, training or empty("No run has recorded a step."), throughput),
        section(
            "Memory",
            figure(
                stacked(held, HELD, size),
                "Memory ledgers",
                ["plan.json: memory", "observed/rank-*.json: peak_by_category"],
            )
            if held
            else "",
        ),
        section(
            "Time of a step",
            figure(
                stacked(spent, step_time.KINDS, duration),
                "Parts of a step",
                ["plan.json: step", "profile.json: measured.step", "metrics.jsonl: step_s"],
            )
            if spent
            else "",
        ),
        section("Differences", _differing(drawn)),
    ]
    each = [
        Markup(
            folded(
                f"{one.run.name}: events, data, samples, versions",
                joined(
                    (
                        _warnings(one.run),
                        section(f"Events of {one.run.name}", _events(one.run, one.events)),
                        section(f"Data of {one.run.name}", data.section(one.run)),
                        section(f"Samples of {one.run.name}", samples.section(one.run)),
                        section(f"Versions of {one.run.name}", reproduce.section(one.run)),
                    )
                ),
            ).replace("<details", '<details class="run"', 1)
        )
        for one in drawn
    ]
    names = " · ".join(one.name for one in found)
    head = Markup(
        f'<header class="top"><p class="kicker">Shoal · {len(found)} runs side by side</p>'
        f"<h1>{escape(names)}</h1></header>"
    )
    body = joined(
        [head, navigation(sections), Markup("<main>"), *sections, *each, Markup("</main>"), _footer()]
    )
    return body, {**charts, **more}


def _named(drawn: Drawn, found: Sequence[tuple[Any, str]]) -> list[Any]:
    from dataclasses import replace

    return [replace(bar, name=f"{drawn.run.name}: {bar.name}") for bar, _ in found]


def _differing(drawn: Sequence[Drawn]) -> Markup:
    rows = differences([one.run.config for one in drawn])
    if not rows:
        return empty("Same config, apart from name and directory.")
    content = table(("key", *(one.run.name for one in drawn)), rows, style="names")
    return figure(content, "Config keys that differ", ["config.toml"])


def _footer() -> Markup:
    made = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return Markup(
        f"<footer>Made by Shoal {escape(__version__)}, {made} UTC. Self-contained: the page loads nothing. Curves by "
        "uPlot (MIT). Long runs are thinned: each pixel shows its median, lowest and highest value, and steps next to "
        "an event are all kept.</footer>"
    )
