"""The checkpoints of a run: which there are, which is the last, which are no longer kept. Needs no torch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

UNFINISHED = ".unfinished-"


def step_directory(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def committed(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every committed checkpoint, oldest first. A rename is the commit, so a name is proof."""
    if not checkpoints.is_dir():
        return []
    found = []
    for entry in checkpoints.iterdir():
        match = re.fullmatch(r"step-([0-9]{8,})", entry.name)
        if match and entry.is_dir():
            found.append((int(match[1]), entry))
    return sorted(found)


def latest(checkpoints: Path) -> Path | None:
    every = committed(checkpoints)
    return every[-1][1] if every else None


def tidy(checkpoints: Path, keep: int) -> None:
    """Remove what crashes left unfinished and all but the last ``keep`` checkpoints."""
    for entry in checkpoints.glob(UNFINISHED + "*"):
        shutil.rmtree(entry, ignore_errors=True)
    for _, old in committed(checkpoints)[:-keep]:
        # Renamed first: a half-removed checkpoint must not be taken for a whole one.
        doomed = old.rename(checkpoints / f"{UNFINISHED}{old.name}")
        shutil.rmtree(doomed, ignore_errors=True)
