"""Events of a run, as marks on its curves and as rows of a table: faults, restarts, changes of layout."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from shoal.facts.redact import redact
from shoal.report.columns import is_number
from shoal.report.run_files import RunFiles

FAULT, RESTART, LAYOUT, NOTE = "fault", "restart", "layout", "note"
# Kinds in faults.jsonl that undid and stopped nothing.
NOTES = ("straggler", "spike", "compile", "commit", "staging", "tampering")
# The longest text in a table, and on a curve.
LONGEST, LONGEST_MARK = 600, 140


@dataclass(frozen=True)
class RunEvent:
    """``step``: the step it followed, or happened in."""

    kind: str
    what: str  # in a word or two
    step: int
    text: str
    source: str  # file and field
    time: float | None = None
    rank: int | None = None

    @property
    def when(self) -> str:
        if self.time is None or not 0 < self.time < 1e11:
            return ""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.time))


def events(run: RunFiles) -> list[RunEvent]:
    """In chronological order; events without a known time come before the next later step."""
    found = sorted(map(_fault, run.faults), key=lambda one: one.time or 0.0)
    for change in _changes(run):
        after = (place for place, one in enumerate(found) if one.step > change.step)
        found.insert(next(after, len(found)), change)
    return found


def _fault(row: dict[str, Any]) -> RunEvent:
    kind = str(row.get("kind", "fault"))
    step = row.get("step", row.get("resumed_step", 0))
    when = float(row["time"]) if is_number(row.get("time")) else None
    rank = int(row["rank"]) if is_number(row.get("rank")) else None
    if kind == "restart":
        text = f"workers restarted from the state after step {row.get('resumed_step', '?')}"
        return RunEvent(RESTART, "restart", _step(step), text, "faults.jsonl: kind, resumed_step", when)
    parts = [str(row[name]) for name in ("message", "action") if row.get(name)]
    text = redact("; ".join(parts))[:LONGEST] or kind
    what = NOTE if kind in NOTES else FAULT
    return RunEvent(what, kind, _step(step), text, "faults.jsonl: kind, step, message, action", when, rank)


def _step(value: Any) -> int:
    return int(value) if is_number(value) else 0


def _changes(run: RunFiles) -> list[RunEvent]:
    """Rows whose layout or attempt differs from the row before."""
    rows, found = run.metrics, []
    restarted = {event.step for event in map(_fault, run.faults) if event.kind == RESTART}
    for place in range(1, len(rows)):
        before, after, step = rows.layouts[place - 1], rows.layouts[place], rows.steps[place - 1]
        if after is not None and before is not None and after != before:
            found.append(RunEvent(LAYOUT, "layout", step, f"{before} → {after}", "metrics.jsonl: layout"))
        elif rows.attempts[place] != rows.attempts[place - 1] and step not in restarted:
            text = f"resumed after step {step}"
            found.append(RunEvent(RESTART, "resumed", step, text, "metrics.jsonl: attempt"))
    return found


def marks(run: RunFiles, found: list[RunEvent], most: int = 400) -> list[dict[str, Any]]:
    """Marks on curves, with x in every unit that curves may use. If there are very many, the gravest are kept."""
    rows = run.metrics
    if not rows.steps:
        return []
    tokens, hours = rows.column("tokens"), rows.hours()
    gravest = sorted(found, key=lambda one: (FAULT, RESTART, LAYOUT, NOTE).index(one.kind))[:most]
    drawn = []
    for event in sorted(gravest, key=lambda one: one.step):
        place = min(max(bisect_right(rows.steps, event.step) - 1, 0), len(rows) - 1)
        drawn.append(
            {
                "kind": event.kind,
                "text": f"step {event.step}: {event.what}: {event.text}"[:LONGEST_MARK],
                "x": {"step": event.step, "tokens": tokens[place], "hours": hours[place]},
            }
        )
    return drawn
