"""Processes of a machine from /proc, and signals to them. Needs no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def send(processes: Iterable[int], number: int) -> None:
    """Send a signal to several processes, some of which may be gone."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def is_stopped(process: int) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    return state(process) in ("T", "t")


def is_gone(process: int) -> bool:
    """Whether it has ended, including a zombie whose exit code has not been read."""
    return state(process) in ("X", "Z")


def state(process: int) -> str:
    """Its main thread's state: one letter, as in Linux; empty without /proc."""
    if not Path("/proc/self/stat").exists():
        return ""
    found = _status(process)
    return found[0] if found else "X"


def started(process: int) -> str:
    """Its start time as the system counts it, because process ids are reused. Empty if unknown."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def process_space() -> str:
    """The PID namespace, within which process ids are unique: a container has its own. Empty if unknown."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def starved(process: int) -> float:
    """Total seconds for which its main thread was ready to run while others had the processors.

    0 if Linux does not say.
    """
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def parent_of(process: int) -> int | None:
    """The parent of a process; None if there is no such process, or only a zombie."""
    found = _status(process)
    return None if not found or found[0] in "ZX" else int(found[1])


def descendants(process: int) -> list[int]:
    """Children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := parent_of(int(entry.name))) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [process]
    while waiting:
        mine = children.get(waiting.pop(), [])
        found += mine
        waiting += mine
    return found


def _status(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # After the name, which is in parentheses and may contain any character.
    return status.rpartition(")")[2].split()
