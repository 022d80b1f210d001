"""A pipeline's timeline as SVG in the page's colours: one row per rank, time from left to right, idle time empty."""

from __future__ import annotations

from html import escape

from shoal.facts.schedules.programs import Action, Event, Timeline, bubble
from shoal.report.bars import key
from shoal.report.markup import Markup

COLOURS = {
    Action.FORWARD: ("forward", 1),
    Action.BACKWARD: ("backward", 4),
    Action.INPUT: ("backward: input", 3),
    Action.WEIGHT: ("backward: weights", 2),
}
ROW, GAP, LEFT, WIDTH = 22, 5, 58, 1000
LETTER = 6.6


def drawn(timeline: Timeline) -> Markup:
    """Scrolls by itself on a narrow screen."""
    scale = (WIDTH - LEFT) / timeline.end if timeline.end else 0.0
    height = len(timeline.ranks) * (ROW + GAP)
    parts = []
    for number, row in enumerate(timeline.ranks):
        top = number * (ROW + GAP)
        first_stage = min((event.instruction.stage for event in row), default=0)
        parts.append(f'<text x="0" y="{top + 15}">stage {number}</text>')
        parts.append(f'<rect class="f0" x="{LEFT}" y="{top}" width="{WIDTH - LEFT}" height="{ROW}" rx="2"/>')
        parts += [_box(event, top, scale, event.instruction.stage != first_stage) for event in row]
    label = f"Pipeline of {len(timeline.ranks)} stages, {bubble(timeline):.1%} idle"
    # As wide as there is room for, but never so narrow that the numbers become unreadable.
    picture = (
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height}" style="width:100%;min-width:860px" role="img"'
        f' aria-label="{escape(label)}">{"".join(parts)}</svg></div>'
    )
    used = {event.instruction.action for row in timeline.ranks for event in row}
    shown = [COLOURS[action] for action in COLOURS if action in used]
    return Markup(picture + key([*shown, (f"idle: {bubble(timeline):.1%} of all stages' time", 0)]))


def _box(event: Event, top: int, scale: float, later: bool) -> str:
    instruction = event.instruction
    left, wide = LEFT + event.start * scale, (event.end - event.start) * scale
    pale = ' fill-opacity=".55"' if later else ""
    box = (
        f'<rect class="f{COLOURS[instruction.action][1]}" x="{left:.1f}" y="{top}" width="{max(wide - 1, 0.4):.1f}"'
        f' height="{ROW}" rx="2"{pale}><title>{escape(str(instruction))}</title></rect>'
    )
    micro = str(instruction.micro)
    if len(micro) * LETTER > wide - 3:
        return box
    return (
        f'{box}<text class="on" x="{left + wide / 2:.1f}" y="{top + 15}" text-anchor="middle">{micro}</text>'
    )
