"""The live view in a terminal: numbers, curves, ranks, events, the end of a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import sleep

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from shoal.report.columns import Columns
from shoal.report.events import FAULT, LAYOUT, RESTART, events
from shoal.report.numbers import count, duration, percent, size
from shoal.report.run.summary import summary
from shoal.report.run_files import EARLY, FAILED, FINISHED, LOST, RUNNING
from shoal.report.watch.follow import RankView, RunFollower, happened, seconds_left, stragglers
from shoal.report.watch.plot import plotted

SECONDS = 1.0
COLOURS = {RUNNING: "cyan", FINISHED: "green", EARLY: "green", FAILED: "red", LOST: "red"}
MARKS = {FAULT: "red", RESTART: "yellow", LAYOUT: "blue"}
MOST_RANKS, MOST_EVENTS, LOG_LINES = 16, 6, 8


def watch(follower: RunFollower, console: Console, rank: int, once: bool) -> None:
    """Runs until interrupted; ``once``: one frame, for a pipe or a quick look."""
    if once or not console.is_terminal:
        follower.look()
        console.print(frame(follower, console, rank))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            follower.look()
            live.update(frame(follower, console, rank), refresh=True)
            sleep(SECONDS)


def frame(follower: RunFollower, console: Console, rank: int) -> RenderableType:
    run = follower.run
    found = summary(run, events(run))
    colour = COLOURS.get(found.state, "white")
    head = Text.assemble((found.name, "bold"), "  ", (found.state, colour), "  ", (found.layout or "", "dim"))
    parts: list[RenderableType] = [head, Text(_numbers(follower), overflow="fold")]
    plain = not (console.encoding or "").lower().startswith("utf")
    parts.append(Padding(_curves(run.metrics, console.width, plain), (1, 0, 0, 0)))
    if table := _ranks(follower.ranks(), found.state == RUNNING):
        parts += [Rule("ranks", style="dim", align="left"), table]
    if slow := stragglers(run):
        parts += [Text(f"straggler: {text}", style="yellow") for text in slow[-1:]]
    told = happened(run, MOST_EVENTS)
    parts.append(Rule("events", style="dim", align="left"))
    parts += [
        Text.assemble(f"step {one.step:>6}  ", (one.what, MARKS.get(one.kind, "dim")), f"  {one.text}"[:200])
        for one in told
    ] or [Text("none", style="dim")]
    if lines := follower.log(rank, LOG_LINES):
        parts.append(Rule(f"log of rank {rank}", style="dim", align="left"))
        parts += [
            Text(line[: 2 * console.width], style="dim", overflow="ellipsis", no_wrap=True) for line in lines
        ]
    return Group(*parts)


def _numbers(follower: RunFollower) -> str:
    run = follower.run
    found, rows = summary(run, events(run)), run.metrics
    of = f"/{run.steps:,}" if run.steps is not None else ""
    parts = [f"step {run.last_step:,}{of}"]
    for words, value, said in (
        ("loss", found.loss, lambda one: f"{one:.4f}"),
        ("validation", found.heldout_loss, lambda one: f"{one:.4f}"),
        ("lr", rows.last("lr"), lambda one: f"{one:.3g}"),
        ("gradient norm", rows.last("grad_norm"), lambda one: f"{one:.3g}"),
        ("tokens/s", rows.last("tokens_per_s"), count),
        ("MFU", rows.last("mfu"), percent),
        ("s/step", rows.last("step_s"), duration),
        ("predicted", found.predicted_step_s, duration),
        ("memory", rows.last("memory_peak"), size),
        ("ETA", seconds_left(run), duration),
    ):
        if value is not None:
            parts.append(f"{words} {said(value)}".replace(" ", "\u00a0"))
    return "  ".join(parts)


def _curves(rows: Columns, width: int, plain: bool) -> RenderableType:
    """Loss and throughput side by side, or stacked on a narrow terminal."""
    side = width >= 100
    each = max(20, (width - 3) // 2 if side else width)
    table = Table.grid(padding=(0, 3, 0, 0))
    boxes = [
        _curve("loss", rows.column("loss"), each, plain, lambda value: f"{value:.4g}"),
        _curve("tokens/s", rows.column("tokens_per_s"), each, plain, count),
    ]
    if side:
        table.add_row(*boxes)
        return table
    return Group(*boxes)


def _curve(
    name: str, values: Sequence[float | None], width: int, plain: bool, said: Callable[[float], str]
) -> RenderableType:
    known = [value for value in values if value is not None]
    if not known:
        return Text(f"{name}: nothing recorded yet", style="dim")
    top, bottom = said(max(known)), said(min(known))
    room = max(len(top), len(bottom))
    lines = plotted(values, max(8, width - room - 3), 7, plain)
    labels = [top, *[""] * (len(lines) - 2), bottom]
    body = "\n".join(f"{label:>{room}} {line}" for label, line in zip(labels, lines, strict=True))
    return Text.assemble((f"{name}\n", "bold"), (body, "cyan"))


def _ranks(ranks: Sequence[RankView], running: bool) -> Table | None:
    """Ranks that lag first, if there are more than fit."""
    known = [one for one in ranks if one.phase or one.memory is not None]
    if not known:
        return None
    shown = sorted(sorted(known, key=lambda one: -one.behind)[:MOST_RANKS], key=lambda one: one.rank)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title, side in (
        ("rank", "right"),
        ("doing", "left"),
        ("step", "right"),
        ("collectives", "right"),
        ("behind", "right"),
        ("memory", "right"),
    ):
        table.add_column(title, justify="right" if side == "right" else "left", no_wrap=True)
    for one in shown:
        table.add_row(
            str(one.rank),
            one.phase + ", silent" * (running and not one.alive) if one.phase else "–",
            str(one.step) if one.phase else "–",
            f"{one.entered:,}" if one.phase else "–",
            Text(str(one.behind), style="yellow") if one.behind else "",
            f"{size(one.memory)} {one.memory_is}" if one.memory is not None else "–",
        )
    if len(known) > len(shown):
        table.add_row("…", f"{len(known) - len(shown)} more", "", "", "", "")
    return table
