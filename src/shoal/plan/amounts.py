"""Durations, money and counts, as people write them."""

from __future__ import annotations

import re

from shoal.facts.problem import Problem
from shoal.facts.recipe import read_count

HOUR, DAY = 3600.0, 86400.0
YEAR = 365.25 * DAY
UNITS = {"minute": 60.0, "h": HOUR, "d": DAY, "w": 7 * DAY, "month": YEAR / 12, "y": YEAR}
WORDS = {"hour": "h", "day": "d", "week": "w", "year": "y"}
LONGEST = 100 * YEAR


def read_deadline(text: str, problems: list[Problem]) -> float | None:
    """Seconds: ``30d``, ``36h``, ``6w``, ``90 days``, ``3 months``; a bare ``m`` is ambiguous."""
    match = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([a-z]+)\s*", text.lower())
    word = match[2].removesuffix("s") if match and len(match[2]) > 2 else match and match[2]
    unit = WORDS.get(word, word) if word else None
    seconds = float(match[1]) * UNITS[unit] if match and unit in UNITS else 0.0
    if not 0 < seconds <= LONGEST:
        problems.append(Problem(f"--deadline {text}: not a length of time", "--deadline 30d, 36h or 6w"))
        return None
    return seconds


def read_budget(text: str, problems: list[Problem]) -> float | None:
    """``2M``, ``$500k``, ``1_500_000``, in the currency of ``--price``."""
    bare = text.strip().lstrip("$€£").replace(",", "")
    try:
        amount = float(read_count(bare))
    except ValueError:
        amount = 0.0
    if not 0 < amount <= 1e15:
        problems.append(Problem(f"--budget {text}: not an amount", "--budget 2M or --budget 500k"))
        return None
    return amount


def short(count: float) -> str:
    """``70.6B``, ``1.3T``."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{suffix}"
    return f"{count:.3g}"


def seconds_per_step(seconds: float) -> str:
    """``0.3296``, ``24.31``, ``1,530``: four digits, never an exponent."""
    return f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.4g}"
