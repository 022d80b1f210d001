"""Files with a row a step, such as metrics.jsonl: each step once, in order, whatever happened in between."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

from shoal.train.files import replace_text


class StepFile:
    """Appends rows that carry their ``step``.

    Opened for a run that continues after ``step``, it drops the rows that came later, and a torn line. On a disk that
    is full rows wait until there is room.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [row for row in read_rows(path) if row["step"] <= step]
        replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("r+b", buffering=0)
        self._end = self._file.seek(0, os.SEEK_END)
        self._waiting = b""
        # Rows come from the training loop, while a commit in the background makes sure of those before it.
        self._lock = threading.Lock()

    def append(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._waiting += json.dumps(row).encode() + b"\n"
            with contextlib.suppress(OSError):
                self._write()

    def sync(self) -> None:
        """Rows up to a commit must survive whatever the commit survives; raises where they cannot be written."""
        with self._lock:
            self._write()
        os.fsync(self._file.fileno())

    def _write(self) -> None:
        # From where the last whole row ends: a full disk may have torn one.
        while self._waiting:
            written = os.pwrite(self._file.fileno(), self._waiting, self._end)
            if written < len(self._waiting):
                os.ftruncate(self._file.fileno(), self._end)
                raise OSError(errno.ENOSPC, "only a part of the rows could be written", self._file.name)
            self._end += written
            self._waiting = b""


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
