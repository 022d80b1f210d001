"""Processes of a machine from /proc, and signals to them. Needs no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def send(processes: Iterable[int], number: int) -> None:
    """A signal to several processes, some of which may be gone."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def is_stopped(process: int) -> bool:
    """Whether a process does not run because a signal, or a debugger, has stopped it."""
    return state(process) in ("T", "t")


def is_gone(process: int) -> bool:
    """Whether it has ended, including a zombie whose exit code has not been read."""
    return state(process) in ("X", "Z")


def state(process: int) -> str:
    """Of its main thread. One letter, as Linux has it; empty where there is no /proc to ask."""
    if not Path("/proc/self/stat").exists():
        return ""
    found = _status(process)
    return found[0] if found else "X"


def started(process: int) -> str:
    """When, as the system counts: numbers of processes are used again. Empty where it is not known."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def process_space() -> str:
    """Within which numbers of processes mean the same: a container has its own. Empty where it is not known."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def starved(process: int) -> float:
    """Seconds, since it began, that its main thread was ready to run while others had the processors.

    0 where Linux does not say.
    """
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def parent_of(process: int) -> int | None:
    """The parent of a process; None where there is no such process, or only its remains."""
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
    """What Linux says of it, from its state on; nothing where there is no such process."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # After the name, which is in parentheses and may hold any character.
    return status.rpartition(")")[2].split()
