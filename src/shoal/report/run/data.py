"""What a run was trained on: its parts with their shares, and rows that were left out."""

from __future__ import annotations

from typing import Any

from shoal.report.bars import Bar, stacked
from shoal.report.columns import is_number
from shoal.report.markup import Markup, figure, grid, table
from shoal.report.numbers import count, percent
from shoal.report.run_files import RunFiles, lookup

COLOURS = 8


def section(run: RunFiles) -> Markup:
    found = run.manifest.get("data_parts")
    described = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return grid(_mix(run), _parts(described), _quarantined(described))


def _mix(run: RunFiles) -> Markup:
    """Shares of samples, from each step on where one changes."""
    mix = lookup(run.config, "data", "mix")
    parts = [one for one in mix if isinstance(one, dict)] if isinstance(mix, list) else []
    if len(parts) < 2:
        return Markup("")
    names = [_short(str(one.get("source"))) for one in parts]
    kinds = {str(place): (name, place % COLOURS + 1) for place, name in enumerate(names)}
    changes = sorted({1, *(step for one in parts for step, _ in _later(one))})
    bars = []
    for begin in changes:
        weights = [_weight(one, begin) for one in parts]
        total = sum(weights) or 1.0
        shares = {str(place): weight / total for place, weight in enumerate(weights)}
        bars.append(Bar(f"from step {begin}", shares, 1.0))
    content = stacked(bars, kinds, percent)
    return figure(content, "Mix", ["config.toml: data.mix"], "Share of samples by source.", wide=True)


def _later(part: dict[str, Any]) -> list[tuple[int, float]]:
    rows = part.get("later")
    found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [
        (int(row["step"]), float(row["weight"]))
        for row in found
        if is_number(row.get("step")) and is_number(row.get("weight"))
    ]


def _weight(part: dict[str, Any], step: int) -> float:
    begun = [weight for first, weight in sorted(_later(part)) if first <= step]
    given = part.get("weight", 1.0)
    return begun[-1] if begun else float(given) if is_number(given) else 0.0


def _parts(described: list[dict[str, Any]]) -> Markup:
    rows = [
        (
            _short(str(one.get("source"))),
            str(one.get("role", "")),
            *(
                count(one[name]) if is_number(one.get(name)) else "–"
                for name in ("documents", "tokens", "heldout_tokens")
            ),
        )
        for one in described
    ]
    titles = ("source", "used for", "documents", "tokens", "held out")
    content = table(titles, rows, numbers=(2, 3, 4))
    return figure(content, "Sources", ["manifest.json: data_parts"], wide=True) if content else Markup("")


def _quarantined(described: list[dict[str, Any]]) -> Markup:
    if not described:
        return Markup("")
    rows = []
    for one in described:
        reasons = one.get("bad_rows")
        for reason, bad in sorted(reasons.items()) if isinstance(reasons, dict) else ():
            rows.append((_short(str(one.get("source"))), str(reason), f"{bad:,}" if is_number(bad) else "–"))
    total = sum(int(one["rows"]) for one in described if is_number(one.get("rows")))
    if rows:
        text = f"Of {total:,} rows. bad_rows.jsonl, next to the tokenised data, lists each of these."
        content = table(("source", "reason", "rows"), rows, numbers=(2,))
    else:
        text, content = "", Markup(f'<p class="empty">None of the {total:,} rows was left out.</p>')
    return figure(content, "Quarantined rows", ["manifest.json: data_parts"], text, wide=True)


def _short(source: str) -> str:
    """The end of a long path says more than its beginning."""
    return source if len(source) <= 60 else f"…{source[-58:]}"
