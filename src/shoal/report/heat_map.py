"""A heat map: experts over time, memory over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from shoal.report.markup import Markup

# Number of shades; cells that differ by less look the same.
SHADES = 12


def heat(
    rows: Sequence[Sequence[float | None]],
    names: Sequence[str],
    columns: Sequence[str],
    said: Callable[[float], str],
    label: str,
    darkest: float = 0.0,
) -> Markup:
    """``rows`` from top to bottom, from 0 to their maximum; labels beside some of them, and below the first and last
    column. ``darkest``: the value for the darkest shade, unless a larger one exists.
    """
    most = max((value for row in rows for value in row if value is not None), default=0.0)
    most = max(most, darkest) or 1.0
    across = max(map(len, rows), default=0)
    if not across:
        return Markup("")
    tall = 16 if len(rows) <= 16 else max(4, 320 // len(rows))
    left, width = 74, 1000
    wide = (width - left) / across
    parts = []
    every = -(-14 // tall)
    for number, row in enumerate(rows):
        top = 4 + number * tall
        if number % every == 0:
            parts.append(f'<text x="0" y="{top + tall / 2 + 4:.0f}">{escape(names[number])}</text>')
        # Neighbours of one shade are merged into one rectangle: a picture of thousands of cells stays small.
        begin = 0
        shades = [_shade(value, most) for value in row]
        for place in range(1, len(row) + 1):
            if place < len(row) and shades[place] == shades[begin]:
                continue
            told = row[begin]
            title = (
                ""
                if told is None
                else f"<title>{escape(names[number])}, {escape(columns[begin])}: {escape(said(told))}</title>"
            )
            parts.append(
                f'<rect x="{left + begin * wide:.1f}" y="{top}" width="{(place - begin) * wide:.1f}"'
                f' height="{tall - 1}" fill-opacity="{shades[begin] / SHADES:.2f}">{title}</rect>'
            )
            begin = place
    height = len(rows) * tall + 24
    parts.append(f'<text x="{left}" y="{height - 4}">{escape(columns[0])}</text>')
    if across > 1:
        parts.append(f'<text x="{width}" y="{height - 4}" text-anchor="end">{escape(columns[-1])}</text>')
    return Markup(
        f'<div class="scroll"><svg class="heat" viewBox="0 0 {width} {height}" style="width:100%;min-width:860px"'
        f' role="img" aria-label="{escape(label)}">{"".join(parts)}</svg></div>'
    )


def _shade(value: float | None, most: float) -> int:
    return 0 if value is None else max(1, round(SHADES * value / most)) if value > 0 else 0
