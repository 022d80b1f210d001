"""Files with one row per step, such as metrics.jsonl: each step once, in order, across resumes."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from shoal.train.files import RowFile, replace_text


class StepFile(RowFile):
    """Rows that carry their ``step``.

    Opened for a run that continues after ``step``, it drops the rows that came later, and a torn line.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [row for row in read_rows(path) if row["step"] <= step]
        replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        super().__init__(path)


# A row is a thousand bytes or two.
ROWS_END = 1 << 16


def last_row(path: Path) -> dict[str, Any] | None:
    """The last complete row of a file that may have millions."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - ROWS_END))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if line.endswith(b"\n") and isinstance(row, dict):
                return row
    return None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a file that may end in a torn line, or that may not be there."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        rows.append(row)
    return rows
