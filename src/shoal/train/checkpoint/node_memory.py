"""In-memory checkpoints, which outlive the processes that wrote them. Needs no torch.

They have the same format as those on disk, in a memory-backed file system: losing a rank costs only the work since the
last step, not since the last commit to disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from shoal.facts.problem import BadInput
from shoal.train.checkpoint.storage import DirectoryStorage

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 names are drawn at random, and their owner is checked


def memory_place(run_id: str, node: str = "0") -> DirectoryStorage:
    """``run_id`` was drawn when the run began, so a run never takes another run's memory for its own."""
    return DirectoryStorage(_root(run_id) / f"node-{node}", durable=False)


def other_places(run_id: str, node: str) -> list[DirectoryStorage]:
    """What is kept on this machine under other names than ``node``."""
    root = _root(run_id)
    found = sorted(root.iterdir()) if root.is_dir() else []
    return [DirectoryStorage(path, durable=False) for path in found if path.name != f"node-{node}"]


def forget(run_id: str) -> None:
    """Free the memory of a run that has ended well."""
    shutil.rmtree(_root(run_id), ignore_errors=True)


def flight_place(run_id: str, node: str) -> Path:
    """Where the ranks of this machine record what they do, if there are several machines: a shared file system would
    have to write every heartbeat of each rank.
    """
    return _root(run_id, "-flight") / f"node-{node}"


def forget_flights(run_id: str, node: str) -> None:
    root = _root(run_id, "-flight")
    shutil.rmtree(root / f"node-{node}", ignore_errors=True)
    with contextlib.suppress(OSError):  # others remain in it
        root.rmdir()


def _root(run_id: str, what: str = "") -> Path:
    # Without such a file system, use a disk: slower, but no worse.
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    root = base / f"shoal-{os.getuid()}-{run_id}{what}"
    try:
        found = root.lstat()
    except OSError:
        return root
    # Any user may create names there, and the directory's owner decides what a run resumes from.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise BadInput(f"{root} belongs to another user, or is not a directory", "have it removed")
    return root
