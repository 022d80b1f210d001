"""What commands print in common."""

from __future__ import annotations

import json
import math
import sys
from typing import Any


def print_json(document: Any) -> None:
    """One JSON document on standard output, and nothing else there."""
    json.dump(_plain(document), sys.stdout, indent=2, default=str, allow_nan=False)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: a loss that is one of them becomes null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """Aligned columns of plain text: nothing is wrapped or cut, so the output can be searched and piped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
