"""Which steps a tracker still has to be given: one curve, however often a run is killed, resumed or laid out anew.

A resume cuts ``metrics.jsonl`` back to the last commit and does the later steps again. Most trackers cannot take a
step back, and would show one done twice as two points. So each keeps the first row that it was given of a step, and
is given no other. Steps that it missed, because it was not there or not on, it is given when it comes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.facts.input.untrusted_files import read_json
from shoal.launch.track.tracker import Held
from shoal.train.files import replace_text

# Of a long run's file that is read at once, up to the end of a line.
BLOCK = 1 << 20


class Cursor:
    """``track.json``: what each tracker holds of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def held(self, tracker: str) -> Held:
        found = self._read().get(tracker)
        if not isinstance(found, dict):
            return Held()
        name, step = found.get("id"), found.get("step")
        return Held(name if isinstance(name, str) else None, step if isinstance(step, int) else 0)

    def note(self, tracker: str, held: Held) -> None:
        content = {**self._read(), tracker: {"id": held.id, "step": held.step}}
        replace_text(self.path, json.dumps(content, indent=2) + "\n")

    def _read(self) -> dict[str, Any]:
        try:
            content = read_json(self.path)
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


class NewRows:
    """The rows of ``metrics.jsonl`` beyond a step, each step once and in order, as they come."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.step = path, after
        self._inode = self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Those of one block; none where there are none yet."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                # A resume puts another file in its place; one that is shorter was cut.
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                content = file.read(BLOCK) + file.readline()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            row = _parsed(line)
            if row is not None and row["step"] > self.step:
                self.step = row["step"]
                yield row


def _parsed(line: bytes) -> dict[str, Any] | None:
    """None for a line that a full disk or a crash has torn."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
