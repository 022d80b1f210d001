"""Files with a row a step, such as metrics.jsonl: each step once, in order, whatever happened in between."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shoal.train.files import replace_text


class StepFile:
    """Appends rows that carry their ``step``.

    Opened for a run that continues after ``step``, it drops the rows that came later, and a torn line.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [row for row in read_rows(path) if row["step"] <= step]
        replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Rows up to a commit must survive whatever the commit survives."""
        self._file.flush()
        os.fsync(self._file.fileno())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a file that may end in a torn line, or that may not be there."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        rows.append(row)
    return rows
