"""Traffic of a step: what a rank sends and receives, by operation and group, and the link it crosses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from shoal.facts.cluster import Cluster
from shoal.facts.config import Config
from shoal.facts.model import Model
from shoal.facts.problem import BadInput
from shoal.plan.explain import link
from shoal.predict.workload import Workload
from shoal.report.bars import Bar, stacked
from shoal.report.columns import is_number
from shoal.report.markup import Markup, empty, figure, grid, table
from shoal.report.numbers import size
from shoal.report.run_files import RunFiles

COLOURS = 8
INSIDE = "inside a node"

Row = tuple[str, str, float, float]  # operation, group, calls, bytes


def rows_of(found: Any) -> list[Row]:
    rows = []
    for row in found if isinstance(found, list) else ():
        if isinstance(row, dict) and is_number(row.get("count")) and is_number(row.get("bytes")):
            rows.append((str(row.get("op")), str(row.get("group")), float(row["count"]), float(row["bytes"])))
    return rows


def links(run: RunFiles) -> Callable[[str], str]:
    """Returns a function that gives the slowest link that a group's ranks cross in the run's cluster and layout."""
    try:
        cluster = Cluster.model_validate(run.manifest.get("cluster"))
        model = Model.model_validate(run.manifest.get("model"))
        recipe = Config.model_validate({"recipe": run.config.get("recipe", {})}).recipe
    except (ValueError, BadInput):
        return lambda group: "link not known"
    inside = cluster.fast.kind if cluster.fast is not None else cluster.device.host_link.kind
    workload = Workload(model, cluster, recipe, run.layout) if run.layout is not None else None

    def of(group: str) -> str:
        if cluster.nodes == 1:
            return f"{inside}, {INSIDE}"
        numbers = [int(one) for one in re.findall(r"\d+", group.partition(" by ")[0])]
        if group.startswith("rank") and numbers:
            nodes = {number // cluster.devices_per_node for number in numbers}
            return f"{inside}, {INSIDE}" if len(nodes) == 1 else f"{cluster.network.kind}, between nodes"
        if workload is None:
            return "link not known"
        kind = link(group, workload)
        return f"{kind}, between nodes" if kind == cluster.network.kind else f"{kind}, {INSIDE}"

    return of


def section(run: RunFiles) -> Markup:
    predicted = rows_of(run.plan.get("traffic"))
    busiest = max(
        run.observed, key=lambda one: sum(row[3] for row in rows_of(one.get("traffic"))), default={}
    )
    counted = rows_of(busiest.get("traffic"))
    if not predicted and not counted:
        alone = run.world == 1
        return empty(
            "A single rank sends nothing."
            if alone
            else "This run has recorded no traffic: neither plan.json nor observed/ has any."
        )
    of = links(run)
    rank = int(busiest.get("rank", 0))
    sources = ["plan.json: traffic", *([f"observed/rank-{rank:05d}.json: traffic"] if counted else [])]
    groups = sorted({row[1] for row in (*predicted, *counted)})
    kinds = {group: (group, number % COLOURS + 1) for number, group in enumerate(groups)}
    bars = []
    for where in sorted({of(group) for group in groups}):
        for words, rows in (("predicted", predicted), (f"counted, rank {rank}", counted)):
            parts: dict[str, float] = {}
            for _, group, _, sent in rows:
                if of(group) == where:
                    parts[group] = parts.get(group, 0.0) + sent
            if parts:
                bars.append(Bar(f"{where}, {words}", parts))
    text = "Per rank and step; the bytes of a call are those of its largest buffer."
    if not counted:
        text += " With run.observe = true the run counts its real traffic."
    by_link = figure(stacked(bars, kinds, size), "By link", sources, text, wide=True)
    return grid(by_link, figure(_table(predicted, counted, of), "By operation", sources, wide=True))


def _table(predicted: list[Row], counted: list[Row], of: Callable[[str], str]) -> Markup:
    keys = sorted({row[:2] for row in (*predicted, *counted)})
    before = {row[:2]: row[2:] for row in predicted}
    after = {row[:2]: row[2:] for row in counted}
    rows = []
    for key in keys:
        cells = [key[0].replace("_", " "), key[1], of(key[1])]
        for side in (before, after) if counted else (before,):
            calls, sent = side.get(key, (None, None))
            cells += ["–" if calls is None else f"{calls:,.0f}", size(sent)]
        rows.append(cells)
    titles = ["operation", "group", "link", "calls, predicted", "bytes, predicted"]
    titles += ["calls, counted", "bytes, counted"] if counted else []
    return table(titles, rows, numbers=range(3, len(titles)))
