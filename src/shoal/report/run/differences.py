"""How two or more configs differ, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

# Name and location identify a run without making it a different one.
PLACE = ("run.name", "run.dir")
LONGEST = 120


def differences(configs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for every key whose values are not all equal."""
    flat = [dict(_flat(config)) for config in configs]
    keys = sorted({key for one in flat for key in one})
    rows = []
    for key in keys:
        values = [one.get(key) for one in flat]
        if key not in PLACE and any(value != values[0] for value in values):
            rows.append((key, *("–" if value is None else str(value)[:LONGEST] for value in values)))
    return rows


def _flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
