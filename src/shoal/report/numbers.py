"""Human-readable numbers."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


def size(value: float | None) -> str:
    """Bytes."""
    if not value:
        return "–"
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {name}" if value / unit < 1000 else f"{value / unit:,.0f} {name}"
    return f"{value:.0f} B"


def count(value: float | None) -> str:
    """A count, in three digits: ``1.23M``."""
    if value is None:
        return "–"
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(value: float | None) -> str:
    """Seconds: ``1.3 ms``, ``42 s``, ``3 h 05 min``, ``12.4 days``."""
    if not value:
        return "–"
    if value < 1e-3:
        return f"{1e6 * value:.3g} µs"
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes, hours = value / 60, value / 3600
    if hours < 1:
        return f"{minutes:.0f} min"
    if hours < 48:
        whole, rest = divmod(round(minutes), 60)
        return f"{whole} h {rest:02d} min"
    return f"{hours / 24:.3g} days"


def moment(text: str) -> str:
    """A time stamp to the minute: ``2026-11-18T15:00:00Z`` is ``2026-11-18 15:00 UTC``; any other text is unchanged."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(?::\d\d)?(?:\.\d+)?Z", text)
    return f"{found[1]} {found[2]} UTC" if found else text[:40]


def percent(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if abs(value) < 0.0995 else f"{100 * value:.0f} %"


def difference(predicted: float | None, measured: float | None) -> str:
    """Predicted over measured, minus one; empty if either is missing."""
    if not predicted or not measured:
        return "–"
    said = f"{100 * (predicted / measured - 1):+.1f} %".replace("-", "−")
    return "0.0 %" if said[1:] == "0.0 %" else said
