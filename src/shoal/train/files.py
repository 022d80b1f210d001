"""Files that are whole or not there: written aside, flushed to disk, then renamed into place."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def disk_is_full(error: OSError) -> bool:
    """No space, no quota, or a file larger than it may be."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# What to do about it, where nothing else can be done.
MAKE_ROOM = "the last commit is untouched: free some space and run the same command again"


def in_words(error: OSError) -> str:
    if not disk_is_full(error):
        return f"{type(error).__name__}: {error}"
    return f"the disk is full ({error.filename})" if error.filename else "the disk is full"


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; a rename is not, until then."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by new content, at once for every reader."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_directory(path.parent)
