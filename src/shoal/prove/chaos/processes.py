"""The processes of a machine, from /proc. Needs no torch."""

from __future__ import annotations

from pathlib import Path


def parent_of(process: int) -> int | None:
    """The parent of a process; None where there is no such process, or only its remains."""
    try:
        # The name, in parentheses, may hold anything.
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(parent)


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
