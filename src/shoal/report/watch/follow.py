"""Follow a run's files: only new rows are read, so that a run of a million steps can be watched. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.facts.redact import redact
from shoal.observe.flight_recorder import END, FlightReader
from shoal.report.columns import Columns, is_number
from shoal.report.events import RunEvent, events
from shoal.report.run_files import RUNNING, RunFiles, lookup, read_run

# Bytes at a log's end to read, and lines to show.
LOG_BYTES, LOG_LINES = 1 << 16, 200
# The most ranks to examine individually.
MOST_RANKS = 512
# Steps over which a run's pace is averaged.
PACE = 20


@dataclass(frozen=True)
class RankView:
    """What a rank does now, if its machine is this one or shares its files."""

    rank: int
    phase: str
    step: int
    entered: int  # number of collectives, over all its groups
    behind: int  # collectives that a peer in one of its groups has entered and this rank has not
    alive: bool  # a heartbeat came since the last look
    memory: int | None  # bytes
    memory_is: str  # what kind of bytes these are


class RunFollower:
    """Call ``look`` repeatedly for the run's current state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows, self._inode, self._offset = Columns(), 0, 0
        self._readers: dict[int, FlightReader] = {}
        self._beats: dict[int, int] = {}
        self.run = read_run(path, self._rows)
        self.look()

    def look(self) -> RunFiles:
        """Everything known now."""
        self._read_rows()
        self.run = read_run(self.path, self._rows)
        return self.run

    def _read_rows(self) -> None:
        """Read new rows up to the last whole line; a resume replaces the file by a shorter one."""
        try:
            with (self.path / "metrics.jsonl").open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._rows, self._inode, self._offset = Columns(), status.st_ino, 0
                file.seek(self._offset)
                content = file.read()
        except OSError:  # not there yet
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                self._rows.add(json.loads(line))
        if not self._rows.in_order:
            self._rows.sort()

    def ranks(self) -> list[RankView]:
        """Every rank with a flight record here, or with known memory."""
        running = self.run.state == RUNNING
        world = min(self.run.world or 0, MOST_RANKS)
        seen = {rank: self._snapshot(rank) for rank in range(world)}
        most: dict[str, int] = {}
        for snapshot in seen.values():
            for channel, count in snapshot.counts.items() if snapshot else ():
                most[channel.id] = max(most.get(channel.id, 0), count)
        peaks = {int(one["rank"]): one.get("peak") for one in self.run.observed}
        found = []
        for rank, snapshot in seen.items():
            resident = _resident(snapshot.pid) if snapshot and running else None
            peak = peaks.get(rank)
            memory, means = (resident, "resident") if resident is not None else (peak, "peak of tensors")
            counts = snapshot.counts if snapshot else {}
            beats = snapshot.beats if snapshot else 0
            found.append(
                RankView(
                    rank,
                    snapshot.phase if snapshot else "",
                    snapshot.step if snapshot else 0,
                    sum(counts.values()),
                    max((most[channel.id] - count for channel, count in counts.items()), default=0),
                    running and snapshot is not None and beats != self._beats.get(rank),
                    int(memory) if is_number(memory) else None,
                    means if memory is not None else "",
                )
            )
            self._beats[rank] = beats
        return found

    def _snapshot(self, rank: int) -> Any:
        reader = self._readers.setdefault(rank, FlightReader(self.path / ".flight" / f"rank-{rank:05d}"))
        try:
            snapshot = reader.look()
        except (ValueError, KeyError, TypeError):  # written by another version
            return None
        return None if snapshot is None or (snapshot.phase == END and self.run.state != RUNNING) else snapshot

    def log(self, rank: int, lines: int = LOG_LINES) -> list[str]:
        """The end of a rank's log, redacted: while a rank writes, its log may still contain secrets."""
        return log_tail(self.path / "logs" / f"rank-{rank:05d}.log", lines)


def log_tail(path: Path, lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - LOG_BYTES))
            content = file.read(LOG_BYTES)
    except OSError:
        return []
    text = redact(content.decode(errors="replace"))
    return list(deque(text.splitlines(), maxlen=lines))


def _resident(pid: int) -> int | None:
    """Bytes of a process's resident set; None if it is not on this machine."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def stragglers(run: RunFiles) -> list[str]:
    """The run's last report on ranks slower than their peers."""
    told = [row for row in run.faults if row.get("kind") == "straggler"]
    return [redact(str(row.get("action", "")))[:300] for row in told[-3:]]


def seconds_left(run: RunFiles) -> float | None:
    """At the pace of the last steps; None if the run is over, or the pace is unknown."""
    recent = [value for value in run.metrics.column("step_s")[-PACE:] if value is not None]
    if run.state != RUNNING or run.steps is None or not recent:
        return None
    return max(0, run.steps - run.last_step) * sum(recent) / len(recent)


def happened(run: RunFiles, most: int = 50) -> list[RunEvent]:
    """The last events, newest first."""
    return list(reversed(events(run)[-most:]))


def predicted_seconds(run: RunFiles) -> float | None:
    found = lookup(run.plan, "step", "seconds")
    return float(found) if is_number(found) else None
