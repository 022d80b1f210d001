"""Which steps a tracker still has to get: one curve, however often a run is killed, resumed or re-laid out.

A resume cuts ``metrics.jsonl`` back to the last commit and repeats the later steps. Most trackers cannot undo a step,
and would show a repeated one as two points. So each keeps the first row it got of a step, and gets no other. Steps that
it missed, because it was down or disabled, are sent when it returns.
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

# Bytes of a long run's file to read at once, up to the end of a line.
BLOCK = 1 << 20


class Cursor:
    """``track.json``: what each tracker has of the run."""

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
    """The rows of ``metrics.jsonl`` after a given step, each step once and in order, as they appear."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.step = path, after
        self._inode = self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The rows of one block; none if there are none yet."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                # A resume replaces the file; a shorter one was cut.
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
    """None for a line torn by a full disk or a crash."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
