"""Stacked bars on a common scale, drawn as SVG, with a legend and a table of the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shoal.report.markup import Markup, table
from shoal.report.numbers import difference

# Colours of page.css, 1 to 8.
HELD = {
    "params": ("parameters", 1),
    "grads": ("gradients", 2),
    "optimizer": ("optimizer states", 3),
    "activations": ("activations", 4),
    "logits": ("logits", 5),
    "buffers": ("buffers", 6),
    "reserve": ("context and fragmentation", 9),
}
SPENT = {
    "compute": ("computation", 1),
    "recompute": ("recomputation", 7),
    "exposed_comm": ("exposed communication", 4),
    "bubble": ("pipeline bubble", 6),
    "optimizer": ("optimizer", 3),
    "offload": ("offload", 5),
    "other": ("host and input", 8),
}

Kinds = Mapping[str, tuple[str, int]]


@dataclass(frozen=True)
class Bar:
    """``parts`` by kind; ``total`` is printed beside the bar, and may exceed their sum."""

    name: str
    parts: Mapping[str, float]
    total: float | None = None

    @property
    def sum(self) -> float:
        return sum(self.parts.values())

    @property
    def length(self) -> float:
        return max(self.sum, self.total or 0.0)


def stacked(
    bars: Sequence[Bar], kinds: Kinds, said: Callable[[float | None], str], limit: float | None = None
) -> Markup:
    """``limit``: a line across, such as a device's memory; if it is far away, it is only mentioned."""
    longest = max((bar.length for bar in bars), default=0.0)
    near = limit is not None and limit <= 3 * longest
    scale = max(longest, limit if near and limit is not None else 0.0) or 1.0
    rows = []
    for bar in bars:
        left, boxes = 0.0, []
        for name, (words, colour) in kinds.items():
            value = bar.parts.get(name, 0.0)
            if value <= 0:
                continue
            wide = 100 * value / scale
            boxes.append(
                f'<rect class="f{colour}" x="{left:.3f}%" width="{wide:.3f}%" height="100%">'
                f"<title>{escape(words)}: {escape(said(value))}</title></rect>"
            )
            left += wide
        if near and limit is not None:
            at = min(100 * limit / scale, 99.8)
            boxes.append(f'<line class="limit" x1="{at:.3f}%" x2="{at:.3f}%" y1="0" y2="100%"/>')
        label = ", ".join(
            f"{kinds[name][0]} {said(value)}"
            for name, value in bar.parts.items()
            if value > 0 and name in kinds
        )
        picture = f'<svg role="img" aria-label="{escape(f"{bar.name}: {label}")}">{"".join(boxes)}</svg>'
        rows.append(
            f'<span class="name">{escape(bar.name)}</span><span class="bar">{picture}</span>'
            f'<span class="sum">{escape(said(bar.total if bar.total is not None else bar.sum))}</span>'
        )
    used = [name for name in kinds if any(bar.parts.get(name, 0.0) > 0 for bar in bars)]
    return Markup(f'<div class="bars">{"".join(rows)}</div>{key([kinds[name] for name in used])}')


def key(kinds: Sequence[tuple[str, int]]) -> Markup:
    items = "".join(
        f'<li><span class="swatch b{colour}"></span>{escape(words)}</li>' for words, colour in kinds
    )
    return Markup(f'<ul class="key">{items}</ul>')


def swatch(words: str, colour: int) -> Markup:
    return Markup(f'<span class="swatch b{colour}"></span>{escape(words)}')


def numbers_of(
    bars: Sequence[Bar],
    kinds: Kinds,
    said: Callable[[float | None], str],
    compared: tuple[int, int] | None = None,
    whole: str = "total",
) -> Markup:
    """The same as a table. ``compared``: indices of a predicted and a measured bar to compare."""
    short = [bar.name.partition(",")[0] for bar in bars]
    names = short if len({*short}) == len(short) else [bar.name for bar in bars]
    titles = ["", *names, *(["error"] if compared else [])]

    def row(words: str, values: Sequence[float]) -> list[str]:
        cells = [words, *(said(value) for value in values)]
        if compared:
            cells.append(difference(values[compared[0]], values[compared[1]]))
        return cells

    rows = [
        row(swatch(words, colour), [bar.parts.get(name, 0.0) for bar in bars])
        for name, (words, colour) in kinds.items()
        if any(bar.parts.get(name, 0.0) > 0 for bar in bars)
    ]
    rows.append(row(whole, [bar.total if bar.total is not None else bar.sum for bar in bars]))
    return table(titles, rows, numbers=range(1, len(titles)), style="narrow")
