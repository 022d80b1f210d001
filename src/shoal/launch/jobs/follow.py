"""Read a job's log: its last lines, or new lines until the job is over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from shoal.facts.problem import BadInput
from shoal.facts.redact import printable
from shoal.launch.jobs.state import JobState

# Seconds between two looks at a log, and between two queries to a scheduler, which serves others too.
LOOK_SECONDS, ASK_SECONDS = 0.5, 2.0
# The bytes at the end of a file in which to look for the last lines.
LARGEST_END = 1 << 20


def last_lines(path: Path, count: int) -> str:
    """The last lines of a file that may be large, or missing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LARGEST_END))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:]) if count > 0 else ""


def follow(
    path: Path | None,
    status: Callable[[], JobState],
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> JobState:
    """Report what a job prints (to ``path``, if it has a log) and every change of its state, until it is over."""
    place, told, asked, found = 0, "", 0.0, status()
    while True:
        if found.state != told:
            told = found.state
            say(f"[{found.state}{f' on {found.nodes}' if found.nodes else ''}]")
        place = _say_more(path, place, say)
        if found.over:
            return found
        sleep(LOOK_SECONDS)
        if time.monotonic() - asked >= ASK_SECONDS:
            asked = time.monotonic()
            try:
                found = status()
            except (
                BadInput
            ) as error:  # a restarting controller or a network failure says nothing about the job
                if told != (silent := error.problems[0].what):
                    told = silent
                    say(f"[{silent}; asking again]")


def _say_more(path: Path | None, place: int, say: Callable[[str], None]) -> int:
    """Report new whole lines; returns where to continue."""
    if path is None or not path.exists():
        return place
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) < place:
            place = 0  # the file was restarted
        file.seek(place)
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        say(printable(line))
    return place + len(whole)
