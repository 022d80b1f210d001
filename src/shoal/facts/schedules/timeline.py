"""Draw a simulated pipeline as text or SVG: one row per rank, time from left to right."""

from __future__ import annotations

from math import floor

from shoal.facts.schedules.programs import Action, Event, Timeline, bubble

_COLOURS = {
    Action.FORWARD: ("#4e79a7", "forward"),
    Action.BACKWARD: ("#e15759", "backward"),
    Action.INPUT: ("#f28e2b", "backward: input"),
    Action.WEIGHT: ("#59a14f", "backward: weights"),
}
_ROW, _GAP, _LEFT = 22, 4, 56  # pixels: row height, gap between rows, width of the rank labels
_LETTER = 6.5  # pixels per character of a label


def as_text(timeline: Timeline, unit: float | None = None) -> str:
    """One line per rank, one cell per unit of time (by default the shortest computation).

    ``F3`` is the forward of micro-batch 3; lower-case letters are a rank's later chunks. A dash continues a
    computation, a dot is idle time.
    """
    events = [event for row in timeline.ranks for event in row]
    unit = unit or min((event.end - event.start for event in events if event.end > event.start), default=1.0)
    width = 1 + len(str(max((event.instruction.micro for event in events), default=0)))
    lines = []
    for rank, row in enumerate(timeline.ranks):
        first_stage = min((event.instruction.stage for event in row), default=0)
        cells: list[str] = []
        for event in row:
            begin, end = floor(event.start / unit + 0.5), floor(event.end / unit + 0.5)
            cells += ["."] * (begin - len(cells))
            letter = event.instruction.action.value
            later_chunk = event.instruction.stage != first_stage
            cells.append(f"{letter.lower() if later_chunk else letter}{event.instruction.micro}")
            cells += ["-"] * (end - len(cells))
        cells += ["."] * (floor(timeline.end / unit + 0.5) - len(cells))
        lines.append(
            f"rank {rank:<{len(str(len(timeline.ranks) - 1))}} "
            + " ".join(f"{cell:<{width}}" for cell in cells)
        )
    return "\n".join(line.rstrip() for line in lines)


def as_svg(timeline: Timeline, width: int = 1200) -> str:
    """A self-contained picture ``width`` pixels wide: colours for F, B, I and W, pale for later chunks of a rank."""
    scale = (width - _LEFT) / timeline.end if timeline.end else 0.0
    height = (len(timeline.ranks) + 1) * (_ROW + _GAP) + _GAP
    label = f"Pipeline timeline of {len(timeline.ranks)} ranks, {bubble(timeline):.1%} idle"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="sans-serif" font-size="11" role="img" aria-label="{label}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for rank, row in enumerate(timeline.ranks):
        top = _GAP + rank * (_ROW + _GAP)
        first_stage = min((event.instruction.stage for event in row), default=0)
        parts.append(f'<text x="4" y="{top + 15}" fill="#222222">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{width - _LEFT}" height="{_ROW}" fill="#eeeeee"/>')
        parts += [_box(event, top, scale, pale=event.instruction.stage != first_stage) for event in row]
    parts += _legend(_GAP + len(timeline.ranks) * (_ROW + _GAP), f"{bubble(timeline):.1%} idle")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(event: Event, top: int, scale: float, pale: bool) -> str:
    instruction = event.instruction
    left, wide = _LEFT + event.start * scale, (event.end - event.start) * scale
    opacity, ink = ("0.5", "#000000") if pale else ("1", "#ffffff")
    box = (
        f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_ROW}" fill="{_COLOURS[instruction.action][0]}"'
        f' fill-opacity="{opacity}" stroke="#ffffff" stroke-width="0.5"><title>{instruction}</title></rect>'
    )
    micro = str(instruction.micro)
    if len(micro) * _LETTER > wide:
        return box
    middle = left + wide / 2
    return f'{box}<text x="{middle:.2f}" y="{top + 15}" fill="{ink}" text-anchor="middle">{micro}</text>'


def _legend(top: int, idle: str) -> list[str]:
    parts, left = [], float(_LEFT)
    for colour, name in [*_COLOURS.values(), ("#eeeeee", idle)]:
        parts.append(f'<rect x="{left:.0f}" y="{top + 4}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{left + 19:.0f}" y="{top + 15}" fill="#222222">{name}</text>')
        left += 40 + len(name) * _LETTER
    return parts
