"""The flight recorder: a rank's phase and recent collectives, in memory that other processes can read.

It is a memory-mapped file, so it is readable however its rank ended or whatever blocks it: a lock, a C call, a signal.
torch's own recorder was tried first (2.13): on gloo it misses point-to-point messages and the completion of
collectives, and reading it takes a call inside the rank, which needs the GIL and seconds.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

# The phases that a rank announces.
START, RESTORE, FIRST_STEP, STEP, INPUT = "start", "restore", "first step", "step", "input"
EVALUATE, COMMIT, EXPLAIN, END = "evaluate", "commit", "explain", "end"
REFERENCE = "reference"

# File layout: a header, the heartbeat, a counter for every channel, the last entries in a ring buffer, and the
# channels' descriptions as JSON.
HEADER = struct.Struct("<QQQQ16sIIII")
COUNT = struct.Struct("<Q")
LONGEST_PLACE = 200
ENTRY = struct.Struct(f"<IQQd24s{LONGEST_PLACE}s")
MOST_CHANNELS = 256
MOST_ENTRIES = 512
DESCRIPTIONS = 1 << 17
ENTERED_AT = 0
BEAT_AT = HEADER.size
COUNTS_AT = BEAT_AT + COUNT.size
ENTRIES_AT = COUNTS_AT + MOST_CHANNELS * COUNT.size
DESCRIPTIONS_AT = ENTRIES_AT + MOST_ENTRIES * ENTRY.size
SIZE = DESCRIPTIONS_AT + DESCRIPTIONS

# The heartbeat interval. Heartbeats come from a Python thread, so they stop while anything holds the GIL.
BEAT_SECONDS = 0.2


class Announce(Protocol):
    """Announces what a rank is about to do, and in which step: ``enter("evaluate", 100)``.

    A long phase is announced again for each of its ``parts``: ``enter("evaluate", 100, 3, 16)``.
    """

    def __call__(self, phase: str, step: int, part: int = 0, parts: int = 0, /) -> None: ...


@dataclass(frozen=True)
class Channel:
    """Where ranks meet: all ranks of a group, each time; or, if ``directed``, a sender and a receiver."""

    id: str  # torch's name of the group, the same on all of its ranks
    group: str  # the layout's axis
    ranks: tuple[int, ...]
    directed: bool = False

    def __hash__(self) -> int:
        """Without hashing every rank: each member of a group of ten thousand computes it."""
        return hash((self.id, self.group, self.directed, len(self.ranks)))

    def as_json(self) -> list[Any]:
        """Evenly spaced ranks as (first, step, count), which all groups of a layout are."""
        return [self.id, self.group, _packed(self), self.directed]


@dataclass(frozen=True)
class FlightEntry:
    """One collective, or one end of a message, as it was entered."""

    channel: Channel
    number: int  # sequence number in its channel, from 1
    op: str
    bytes: int
    time: float
    where: str  # file:line


@dataclass(frozen=True)
class Snapshot:
    """A rank's recorder when it was read."""

    pid: int
    main_thread: int
    step: int
    phase: str
    beats: int
    counts: dict[Channel, int]
    entries: tuple[FlightEntry, ...]  # oldest first
    starved: float = 0.0  # seconds in which it was runnable but others had the processors
    part: tuple[int, int] = (0, 0)  # current part of the phase and number of parts; (0, 0): unknown

    def as_json(self) -> dict[str, Any]:
        """For a watchdog on another machine. Entries refer to their channel by its index among the counters."""
        places = {channel: place for place, channel in enumerate(self.counts)}
        entries = [
            [places[one.channel], one.number, one.op, one.bytes, one.time, one.where]
            for one in self.entries
            if one.channel in places
        ]
        counts = [[channel.as_json(), count] for channel, count in self.counts.items()]
        about = (self.pid, self.main_thread, self.step, self.phase, self.beats, self.starved)
        return {"about": about, "counts": counts, "entries": entries}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Snapshot:
        channels = [_channel(channel) for channel, _ in row["counts"]]
        counts = {channel: count for channel, (_, count) in zip(channels, row["counts"], strict=True)}
        entries = tuple(FlightEntry(channels[place], *rest) for place, *rest in row["entries"])
        pid, main, step, phase, beats, starved = row["about"]
        return Snapshot(pid, main, step, phase, beats, counts, entries, starved)


class FlightRecorder:
    """The writing side, owned by one rank."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        # Written in full: a page that a full disk refuses later would be a crash instead of an error.
        aside.write_bytes(bytes(SIZE))
        with aside.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self._counts: list[int] = []
        self._phase, self._step, self._part = START, 0, (0, 0)
        self._entered = self._described = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._write_header()
        aside.rename(path)

    def __enter__(self) -> FlightRecorder:
        COUNT.pack_into(self._memory, BEAT_AT, 1)
        threading.Thread(target=self._beat, name="shoal-heartbeat", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.enter(END, self._step)
        self._over.set()

    def _beat(self) -> None:
        beats = 1
        while not self._over.wait(BEAT_SECONDS):
            beats += 1
            COUNT.pack_into(self._memory, BEAT_AT, beats)

    def enter(self, phase: str, step: int, part: int = 0, parts: int = 0, /) -> None:
        with self._lock:
            self._phase, self._step, self._part = phase, step, (part, parts)
            self._write_header()

    def describe(self, channel: Channel) -> int | None:
        """Register a channel for readers; returns its number for ``note``, or None if there is no room."""
        line = json.dumps(channel.as_json()).encode() + b"\n"
        with self._lock:
            index, end = len(self._counts), self._described + len(line)
            if index == MOST_CHANNELS or end > DESCRIPTIONS:
                return None
            self._memory[DESCRIPTIONS_AT + self._described : DESCRIPTIONS_AT + end] = line
            self._described = end
            self._counts.append(0)
            self._write_header()
            return index

    def note(self, index: int, op: bytes, size: int, where: bytes) -> None:
        """Record that a collective is about to be entered. Backward passes may run in other threads, hence the lock."""
        with self._lock:
            number = self._counts[index] = self._counts[index] + 1
            place = ENTRIES_AT + self._entered % MOST_ENTRIES * ENTRY.size
            ENTRY.pack_into(self._memory, place, index, number, size, time.monotonic(), op, where)
            self._entered += 1
            COUNT.pack_into(self._memory, COUNTS_AT + index * COUNT.size, number)
            COUNT.pack_into(self._memory, ENTERED_AT, self._entered)

    def _write_header(self) -> None:
        main = threading.main_thread().ident or 0
        known = len(self._counts), self._described
        phase = self._phase.encode()
        about = self._entered, os.getpid(), main, self._step, phase
        HEADER.pack_into(self._memory, 0, *about, *known, *self._part)


class FlightReader:
    """The reading side, in any process of the same machine. A restarted rank's new file replaces the old one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0
        self._memory: mmap.mmap | None = None
        self._described = 0
        self._channels: list[Channel] = []

    def look(self, entries: bool = False) -> Snapshot | None:
        """The current snapshot; None before the rank has begun. ``entries`` only on request, since they take longer."""
        if not self._open() or self._memory is None:
            return None
        memory = self._memory
        entered, pid, main, step, phase, known, described, *part = HEADER.unpack_from(memory)
        if described != self._described:
            self._channels = _channels(memory[DESCRIPTIONS_AT : DESCRIPTIONS_AT + described])
            self._described = described
        channels = self._channels[:known]
        counts = {
            channel: COUNT.unpack_from(memory, COUNTS_AT + index * COUNT.size)[0]
            for index, channel in enumerate(channels)
        }
        last = tuple(self._entries(memory, entered)) if entries else ()
        (beats,) = COUNT.unpack_from(memory, BEAT_AT)
        name = phase.rstrip(b"\0").decode()
        return Snapshot(pid, main, step, name, beats, counts, last, part=(part[0], part[1]))

    def close(self) -> None:
        """Close the file: an open file keeps its disk from being unmounted."""
        self._memory, self._inode = None, 0

    def _open(self) -> bool:
        try:
            inode = self.path.stat().st_ino
            if inode != self._inode:
                with self.path.open("rb") as file:
                    self._memory = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
                self._inode, self._described, self._channels = inode, 0, []
        except (OSError, ValueError):  # missing or incomplete
            return False
        return True

    def _entries(self, memory: mmap.mmap, entered: int) -> list[FlightEntry]:
        found = []
        for position in range(max(0, entered - MOST_ENTRIES), entered):
            place = ENTRIES_AT + position % MOST_ENTRIES * ENTRY.size
            index, number, size, when, op, where = ENTRY.unpack_from(memory, place)
            if index < len(self._channels):
                texts = op.rstrip(b"\0").decode(), where.rstrip(b"\0").decode(errors="replace")
                found.append(FlightEntry(self._channels[index], number, texts[0], size, when, texts[1]))
        return found


def _channels(lines: bytes) -> list[Channel]:
    rows = [json.loads(line) for line in lines.splitlines()]
    return [_channel(row) for row in rows]


def _channel(row: list[Any]) -> Channel:
    """One object shared by all members: a large world's groups have room for only one list of ranks each."""
    name, group, ranks, directed = row
    return _known_channel(
        name, group, tuple(tuple(ranks.items()) if isinstance(ranks, dict) else ranks), directed
    )


@lru_cache(1 << 16)
def _known_channel(name: str, group: str, ranks: tuple[Any, ...], directed: bool) -> Channel:
    if ranks and isinstance(ranks[0], tuple):
        first, step, count = (dict(ranks)[key] for key in ("first", "step", "count"))
        ranks = tuple(range(first, first + step * count, step))
    return Channel(name, group, ranks, directed)


@lru_cache(1 << 12)
def _packed(channel: Channel) -> dict[str, int] | list[int]:
    ranks = channel.ranks
    if len(ranks) < 4:
        return list(ranks)
    step = ranks[1] - ranks[0]
    if step < 1 or ranks != tuple(range(ranks[0], ranks[0] + step * len(ranks), step)):
        return list(ranks)
    return {"first": ranks[0], "step": step, "count": len(ranks)}


def no_announce(phase: str, step: int, part: int = 0, parts: int = 0, /) -> None:
    """An ``Announce`` that does nothing."""
