"""The loss curve with its faults, as SVG and as terminal text. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from shoal.prove.chaos.campaign import InjectedFault
from shoal.prove.chaos.fault_kinds import BY_NAME

WIDTH, HEIGHT, MARGIN = 1200, 420, 50
COLOURS = {
    "one node": "#8c564b",
    "rank": "#d1495b",
    "launcher": "#2a6f97",
    "node": "#003d5b",
    "checkpoint": "#edae49",
    "network": "#66a182",
}
LEVELS = "▁▂▃▄▅▆▇█"


def svg(rows: Sequence[dict[str, Any]], struck: Sequence[InjectedFault]) -> str:
    """Loss over steps; a mark where each fault struck, coloured by its target."""
    losses = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None]
    steps = max((step for step, _ in losses), default=1)
    low, high = min(loss for _, loss in losses), max(loss for _, loss in losses)

    def across(step: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * step / steps

    def down(loss: float) -> float:
        return MARGIN + (HEIGHT - 2 * MARGIN) * (high - loss) / ((high - low) or 1.0)

    at = dict(losses)
    marks = []
    for one in struck:
        step = min(max(one.step, one.committed, 1), steps)
        title = escape(
            f"{one.kind} at {one.point}, rank {one.rank}, step {step}: recovered in {one.recovered_s:.2f} s"
        )
        place = f'cx="{across(step):.1f}" cy="{down(at.get(step, low)):.1f}" r="3.5"'
        marks.append(
            f'<circle {place} fill="{COLOURS[BY_NAME[one.kind].target]}"><title>{title}</title></circle>'
        )
    curve = " ".join(f"{across(step):.1f},{down(loss):.1f}" for step, loss in losses)
    counts = Counter[str](BY_NAME[one.kind].target for one in struck)
    legend = "".join(
        f'<circle cx="{MARGIN + 170 * number}" cy="{HEIGHT - 14}" r="4" fill="{colour}"/>'
        f'<text x="{MARGIN + 170 * number + 10}" y="{HEIGHT - 10}">{counts[target]} of a {target}</text>'
        for number, (target, colour) in enumerate(COLOURS.items())
    )
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{MARGIN}" y="24" font-size="15">{len(struck)} faults, one curve: loss over {steps} steps</text>'
        f'<text x="6" y="{down(high) + 4:.0f}">{high:.2f}</text><text x="6" y="{down(low) + 4:.0f}">{low:.2f}</text>'
        f'<polyline points="{curve}" fill="none" stroke="#444" stroke-width="1.2"/>{"".join(marks)}{legend}</svg>\n'
    )


def lines(rows: Sequence[dict[str, Any]], struck: Sequence[InjectedFault], width: int = 100) -> list[str]:
    """The curve in one line, and below it the number of faults at each place."""
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    if not losses:
        return []
    width = min(width, len(losses))
    edges = [len(losses) * number // width for number in range(width + 1)]
    bins = [losses[start:stop] for start, stop in pairwise(edges)]
    means = [sum(part) / len(part) for part in bins]
    low, high = min(means), max(means)
    scale = (len(LEVELS) - 1) / ((high - low) or 1.0)
    hits = Counter(
        min(width - 1, (max(one.step, one.committed, 1) - 1) * width // len(losses)) for one in struck
    )
    marks = "".join("·" if not hits[n] else str(hits[n]) if hits[n] < 10 else "+" for n in range(width))
    curve = "".join(LEVELS[round((mean - low) * scale)] for mean in means)
    return [f"loss   {curve}  {losses[0]:.3f} to {losses[-1]:.3f}", f"faults {marks}  {len(struck)}"]
