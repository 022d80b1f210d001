"""Atomic files: written aside, flushed to disk, then renamed into place; and files of rows.

Files with one row per step, such as metrics.jsonl, have each step once, in order, across resumes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Permissions that group and others must not have on a run's files: all of them.
OWNER_ONLY = 0o077


def disk_is_full(error: OSError) -> bool:
    """Whether the error means no space, no quota left, or a file over the size limit."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# The advice when nothing else can be done.
MAKE_ROOM = "the last commit is untouched: free some space and run the same command again"


def in_words(error: OSError) -> str:
    if not disk_is_full(error):
        return f"{type(error).__name__}: {error}"
    return f"the disk is full ({error.filename})" if error.filename else "the disk is full"


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make files that this process creates inside the context readable by their owner only, whatever code creates
    them.
    """
    before = os.umask(OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(before)


class RowFile:
    """Appends rows. On a full disk rows wait until there is room, and no row is ever torn by one that did not fit.

    One thread may add rows while another flushes or syncs earlier ones.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._end = self._file.seek(0, os.SEEK_END)
        self._waiting = b""
        self._lock = threading.Lock()

    def append(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._waiting += json.dumps(row).encode() + b"\n"
            with contextlib.suppress(OSError):
                self._write()

    def flush(self) -> None:
        """Write all rows to the system, where they outlive this process; raises if there is no room."""
        with self._lock:
            self._write()

    def sync(self) -> None:
        """Flush and fsync all rows."""
        self.flush()
        os.fsync(self._file.fileno())

    def _write(self) -> None:
        if not self._waiting:
            return
        written = self._file.write(self._waiting)
        if written != len(self._waiting):
            # Write again from where the last whole row ends.
            os.ftruncate(self._file.fileno(), self._end)
            raise OSError(errno.ENOSPC, "No space left on device", self._file.name)
        self._end += written
        self._waiting = b""


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; a rename is not durable until then."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content atomically."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_directory(path.parent)


class StepFile(RowFile):
    """Rows that carry their ``step``.

    Opened for a run that continues after ``step``, it drops later rows and a torn last line.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [row for row in read_rows(path) if row["step"] <= step]
        replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        super().__init__(path)


# Enough bytes for some rows: one has a thousand or two.
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
    """The complete rows of a file that may end in a torn line or be missing."""
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
