"""Building blocks of pages: sections, figures with their sources, tables, tiles. All text is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

# Markup is accepted wherever text is: its type marks it as escaped.


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def shown(content: str) -> Markup:
    return content if isinstance(content, Markup) else Markup(escape(content))


def joined(parts: Iterable[str]) -> Markup:
    return Markup("".join(shown(part) for part in parts))


def section(title: str, *parts: str, note: str = "") -> Markup:
    """A titled part of a page; empty if it has no content."""
    content = joined(part for part in parts if part)
    if not content:
        return Markup("")
    beneath = f'<p class="note">{shown(note)}</p>' if note else ""
    return Markup(f'<section id="{anchor(title)}"><h2>{escape(title)}</h2>{beneath}{content}</section>')


def anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def navigation(sections: Iterable[str]) -> Markup:
    """Links to the sections of a page."""
    found = re.findall(r'<section id="([^"]+)"><h2>([^<]*)</h2>', "".join(sections))
    links = "".join(f'<a href="#{place}">{title}</a>' for place, title in found)
    return Markup(f'<nav aria-label="Sections">{links}</nav>' if len(found) > 2 else "")


def figure(content: str, title: str, sources: Sequence[str], text: str = "", wide: bool = False) -> Markup:
    """A picture with its caption. ``sources`` name the data it shows, as in ``metrics.jsonl: loss, lr``."""
    said = f" {shown(text)}" if text else ""
    from_ = " · ".join(f"<code>{escape(one)}</code>" for one in sources)
    return Markup(
        f'<figure class="card{" wide" * wide}" data-sources="{escape(" | ".join(sources))}">'
        f"<h3>{escape(title)}</h3>{shown(content)}"
        f'<figcaption>{said} <span class="source">from {from_}</span></figcaption></figure>'
    )


def chart(name: str, label: str) -> Markup:
    """Where a script draws the chart of that name from the page's data."""
    return Markup(
        f'<div class="chart" data-chart="{escape(name)}" role="img" aria-label="{escape(label)}"></div>'
    )


def grid(*parts: str) -> Markup:
    """Cards side by side where there is room."""
    content = joined(part for part in parts if part)
    return Markup(f'<div class="grid">{content}</div>' if content else "")


@dataclass(frozen=True)
class Tile:
    """A single number. ``source`` names where it was read from, as for a figure."""

    name: str
    value: str
    source: str
    note: str = ""


def tiles(numbers: Iterable[Tile]) -> Markup:
    cells = "".join(
        f'<div class="tile" data-sources="{escape(one.source)}" title="{escape(one.source)}">'
        f"<dt>{escape(one.name)}</dt><dd>{escape(one.value)}"
        + (f"<small>{escape(one.note)}</small>" if one.note else "")
        + "</dd></div>"
        for one in numbers
    )
    return Markup(f'<dl class="tiles">{cells}</dl>' if cells else "")


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), style: str = ""
) -> Markup:
    """``numbers``: the right-aligned columns. Scrolls by itself on a narrow screen."""
    right = set(numbers)

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=number' if place in right else ''}>{shown(cell)}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    if not body:
        return Markup("")
    head = f"<thead><tr>{cells(titles, 'th')}</tr></thead>" if any(titles) else ""
    return Markup(f'<div class="scroll"><table class="{style}">{head}<tbody>{body}</tbody></table></div>')


def listed(lines: Iterable[str]) -> Markup:
    items = "".join(f"<li>{shown(line)}</li>" for line in lines)
    return Markup(f'<ul class="plain">{items}</ul>' if items else "")


def folded(title: str, content: str, opened: bool = False) -> Markup:
    if not content:
        return Markup("")
    return Markup(f"<details{' open' * opened}><summary>{escape(title)}</summary>{shown(content)}</details>")


def code(text: str, copy: bool = False) -> Markup:
    """Preformatted text; with ``copy``, a copy button."""
    button = '<button type="button" class="copy" hidden>copy</button>' if copy else ""
    return Markup(f'<div class="code">{button}<pre><code>{escape(text)}</code></pre></div>')


def chip(text: str, kind: str = "") -> Markup:
    return Markup(f'<span class="chip {escape(kind)}">{escape(text)}</span>')


def empty(text: str) -> Markup:
    """Shown in place of a figure that the run has no data for."""
    return Markup(f'<p class="empty">{shown(text)}</p>')


def paragraph(text: str, style: str = "") -> Markup:
    return Markup(f'<p class="{style}">{shown(text)}</p>') if text else Markup("")
