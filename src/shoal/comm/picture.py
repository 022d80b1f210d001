"""Plot bus bandwidth by size with the fitted curves: one self-contained SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10

from shoal.comm.operations import TimedCollective, bus_share
from shoal.predict.time.link_fit import OperationFit

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 480, 90, 190, 76, 60
COLOURS = ("#2a6f97", "#d1495b", "#66a182", "#edae49", "#7d5ba6", "#00798c", "#555555")


def svg(
    calls: Sequence[TimedCollective],
    fits: dict[str, OperationFit],
    title: str,
    promised: float,
    link: str,
) -> str:
    """Measured points, the fitted line of each operation, and the link's bytes/s in the catalogue.

    Both axes are logarithmic, so latency shows as a slope and bandwidth as a level.
    """
    rates = [call.bus_bandwidth for call in calls]
    across = _axis(min(call.bytes for call in calls), max(call.bytes for call in calls), LEFT, WIDTH - RIGHT)
    low, high = 10 ** floor(log10(min(rates))), 10 ** ceil(log10(max(*rates, promised) * 1.001))
    up = _axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_levels(low, high, up), _sizes(calls, across)]
    parts.append(
        f'<path d="M{LEFT} {up(promised):.1f}H{WIDTH - RIGHT}" stroke="#999" stroke-dasharray="6 4"/>'
        f'<text x="{LEFT + 6}" y="{up(promised) - 6:.1f}" fill="#777" font-size="11">'
        f"{escape(f'{link}: {promised / 1e9:.4g} GB/s')}</text>"
    )
    for number, (op, fit) in enumerate(fits.items()):
        colour = COLOURS[number % len(COLOURS)]
        mine = sorted((call for call in calls if call.op == op), key=lambda call: call.bytes)
        points = "".join(
            f'<circle cx="{across(call.bytes):.1f}" cy="{up(call.bus_bandwidth):.1f}" r="3.5" fill="{colour}">'
            f"<title>{escape(f'{op} {call.bytes:,} bytes: {call.bus_bandwidth / 1e9:.4g} GB/s')}</title></circle>"
            for call in mine
        )
        first, last = mine[0].bytes, mine[-1].bytes
        sizes = [first * (last / first) ** (step / 40) for step in range(41)] if last > first else []
        line = " ".join(
            f"{across(size):.1f},{up(size * bus_share(op, fit.ranks) / fit.seconds(round(size))):.1f}"
            for size in sizes
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>{points}')
        words = f"{op} {fit.bandwidth / 1e9:.3g} GB/s, {fit.latency * 1e6:.3g} µs"
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{TOP + 14 + 20 * number}" fill="{colour}" font-size="11">'
            f"{escape(words)}</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="13">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="16" y="28" font-size="17">{escape(title)}</text>'
        f'<text x="16" y="50" fill="#555">bus bandwidth in GB/s by bytes of the largest buffer; '
        f"points measured, lines fitted</text>{''.join(parts)}</svg>\n"
    )


def _axis(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = log10(high / low) or 1.0
    return lambda value: start + (end - start) * log10(value / low) / span


def _levels(low: float, high: float, up: Callable[[float], float]) -> str:
    lines = []
    for power in range(round(log10(low)), round(log10(high)) + 1):
        y = up(10.0**power)
        lines.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e5e5"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{10.0**power / 1e9:g}</text>'
        )
    return "".join(lines)


def _sizes(calls: Sequence[TimedCollective], across: Callable[[float], float]) -> str:
    return "".join(
        f'<text x="{across(size):.1f}" y="{HEIGHT - BOTTOM + 22}" text-anchor="middle" fill="#555" '
        f'font-size="11">{short_size(size)}</text>'
        for size in sorted({call.bytes for call in calls})
    )


def short_size(size: int) -> str:
    """``4K``, ``1.5M``, ``256M``."""
    for unit, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if size >= unit:
            return f"{size / unit:.3g}{letter}"
    return str(size)
