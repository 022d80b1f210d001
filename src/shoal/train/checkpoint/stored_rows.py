"""A run's metrics rows beside its checkpoints in an object store, in parts, so that a run whose first rank moves to
another machine has them.

Each commit adds the rows since the previous one as ``metrics-FIRST-LAST.jsonl``. A resume drops rows after the step it
resumes from, so no step is stored twice. Needs no torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.files import read_rows, replace_text

_PART = re.compile(r"metrics-([0-9]{8,18})-([0-9]{8,18})\.jsonl")

# More parts than this are merged into one when a run resumes, because each takes a request.
MOST_PARTS = 64


class StoredRows:
    """The stored parts of one file of step rows; used on the first rank."""

    def __init__(self, store: ObjectStore, file: Path) -> None:
        self.store, self.file = store, file
        self._sent = 0  # bytes of the file already stored

    def bring(self, done: int) -> None:
        """Make the rows up to a step available both here and there, and remove later ones there."""
        here = {row["step"]: row for row in read_rows(self.file) if row["step"] <= done}
        there: dict[int, dict[str, Any]] = {}
        parts = self._parts()
        for _, last, name in parts:
            rows = [row for row in _parse(self.store.left(name) or "") if row["step"] <= done]
            there |= {row["step"]: row for row in rows}
            if last > done:
                if rows:
                    self._send(rows)
                self.store.take_away(name)
        # Stored rows were vouched for by a commit; local ones may come from an attempt that others have rolled back.
        every = {**here, **there}
        if missing := sorted(here.keys() - there.keys()):
            self._send([here[step] for step in missing])
        if every != here:
            replace_text(self.file, "".join(json.dumps(every[step]) + "\n" for step in sorted(every)))
        if len(parts) > MOST_PARTS:
            whole = self._send([every[step] for step in sorted(every)])
            for _, _, name in self._parts():
                if name != whole:
                    self.store.take_away(name)

    def begin(self) -> None:
        """The file is now as the run continues it, and all of it is stored."""
        self._sent = self.file.stat().st_size

    def add(self) -> None:
        """Store new rows. Call it before a commit, which vouches for its rows."""
        with self.file.open("rb") as file:
            file.seek(self._sent)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if rows := _parse(whole.decode()):
            self._send(rows)
            self._sent += len(whole)

    def _send(self, rows: list[dict[str, Any]]) -> str:
        name = f"metrics-{rows[0]['step']:08d}-{rows[-1]['step']:08d}.jsonl"
        self.store.leave(name, "".join(json.dumps(row) + "\n" for row in rows))
        return name

    def _parts(self) -> list[tuple[int, int, str]]:
        found = [match for name in self.store.notes() if (match := _PART.fullmatch(name))]
        return sorted((int(match[1]), int(match[2]), match[0]) for match in found)


def _parse(text: str) -> list[dict[str, Any]]:
    """The rows of a part; lines that are not rows were put there by others and are skipped."""
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
