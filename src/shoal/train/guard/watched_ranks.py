"""The ranks that a watchdog watches: their flight recorders and, after a stall, their stacks.

Needs no cooperation from a rank and none of its locks: a rank may be stuck in C code, or not be running at all.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from shoal.facts.redact import redact
from shoal.observe import nccl
from shoal.observe.flight_recorder import FlightReader, Snapshot
from shoal.train.guard.processes import is_gone, is_stopped, send, starved, state
from shoal.train.guard.stacks import Standing, ask_for_stacks, main_thread, shown
from shoal.train.run_directory import RunDirectory

# How long to wait for the ranks' stacks.
DUMP_SECONDS = 3.0
SETTLE_SECONDS = 0.1
# A rank without a heartbeat for this long, and not stopped by a signal, holds the GIL.
HEARTBEAT_SECONDS = 2.0
LISTEN_SECONDS = 0.05
# Collectives listed with a rank's stacks.
LISTED = 40


class WatchedRanks(Protocol):
    """All ranks of an attempt, wherever they run."""

    def progressing(self) -> bool:
        """Whether all are known to make progress, so that there is no need to look."""

    def look(self, entries: bool = False) -> list[Snapshot] | None:
        """What their flight recorders show; None while a process has not started or has ended. ``entries`` take
        longer.
        """

    def any_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped one of them."""

    def evidence(self, snapshots: Sequence[Snapshot], patience: float) -> dict[int, Standing]:
        """Have ranks dump their stacks; returns where they stand, for those that did. ``patience``: seconds to
        listen.
        """


class LocalRanks:
    """The ranks of this machine."""

    def __init__(
        self, run: RunDirectory, ranks: Iterable[int], processes: Callable[[], Mapping[int, int]]
    ) -> None:
        """``processes``: the current process of each rank."""
        self.run = run
        self.readers = {rank: FlightReader(run.flight(rank)) for rank in ranks}
        self.processes = processes

    def progressing(self) -> bool:
        """Always False: looking is cheap, so look."""
        return False

    def any_stopped(self) -> bool:
        return any(map(is_stopped, self.processes().values()))

    def look(self, entries: bool = False) -> list[Snapshot] | None:
        """None if a rank has no record yet, or one from an earlier process, which means nothing."""
        processes = self.processes()
        seen = {rank: reader.look(entries) for rank, reader in self.readers.items()}
        found = {rank: one for rank, one in seen.items() if one is not None}
        ours = {rank: one.pid for rank, one in found.items()} == dict(processes)
        if not ours or len(found) < len(self.readers) or any(map(is_gone, processes.values())):
            return None
        return [replace(one, starved=starved(one.pid)) for one in found.values()]

    def evidence(self, snapshots: Sequence[Snapshot], patience: float) -> dict[int, Standing]:
        seen = dict(zip(self.readers, snapshots, strict=True))
        return dump_stacks(self.run, seen, self._locked(seen, patience))

    def _locked(self, seen: Mapping[int, Snapshot], patience: float) -> set[int]:
        """Ranks whose heartbeat has stopped although no signal stopped them."""
        silent = {rank for rank, one in seen.items() if one.beats and not is_stopped(one.pid)}
        deadline = time.monotonic() + min(HEARTBEAT_SECONDS, patience)
        while silent and time.monotonic() < deadline:
            time.sleep(LISTEN_SECONDS)
            for rank in [*silent]:
                now = self.readers[rank].look()
                if now is None or now.beats != seen[rank].beats:
                    silent.remove(rank)
        return silent


def dump_stacks(run: RunDirectory, seen: Mapping[int, Snapshot], locked: set[int]) -> dict[int, Standing]:
    """Have these ranks dump their stacks, and keep the dumps in the run's directory; returns where each of them
    stands.
    """
    stopped = {rank for rank, one in seen.items() if is_stopped(one.pid)}
    # Before any rank is interrupted.
    states = {rank: state(one.pid) for rank, one in seen.items()}
    running = seen.keys() - stopped
    heard = [rank for rank in running if nccl.ask(run.flights, rank)]
    # A stopped process writes when it is continued. It is continued last and briefly, after the others were asked.
    for ranks in (running, stopped):
        for rank in ranks:
            ask_for_stacks(seen[rank].pid)
        send([seen[rank].pid for rank in ranks & stopped], signal.SIGCONT)
        _wait_for({seen[rank].pid: run.stack_dump(rank) for rank in ranks})
        send([seen[rank].pid for rank in ranks & stopped], signal.SIGSTOP)
    _wait_for({seen[rank].pid: nccl.dump_of(run.flights, rank) for rank in heard})
    standings = {}
    for rank, snapshot in seen.items():
        dump = _read(run.stack_dump(rank))
        frames = main_thread(dump, snapshot.main_thread)
        unfinished = _unfinished(run, rank, snapshot)
        device = f"its device has not finished {unfinished[0]}" if unfinished else ""
        standings[rank] = Standing(frames, rank in stopped, rank in locked, states[rank], device)
        on_device = [f"not finished on the device: {one}" for one in unfinished[:LISTED]]
        text = "\n".join([_record(rank, snapshot), *on_device, dump or "it wrote no stacks"])
        # Even without a place for the evidence there is a verdict.
        with contextlib.suppress(OSError):
            run.stacks.mkdir(mode=0o700, exist_ok=True)
            (run.stacks / f"rank-{rank:05d}.txt").write_text(redact(text), encoding="utf-8")
    return standings


def _unfinished(run: RunDirectory, rank: int, snapshot: Snapshot) -> list[str]:
    """Work a rank's device was given and has not finished, oldest first."""
    names = {channel.id: channel.group for channel in snapshot.counts}
    return [
        f"{one.op} #{one.number} of group {names.get(one.group, one.group)} (by torch's count)"
        for one in nccl.pending(nccl.dump_of(run.flights, rank))
    ]


def _wait_for(dumps: Mapping[int, Path]) -> None:
    """Wait until these processes' files have content that no longer grows, except for processes that are gone."""
    deadline = time.monotonic() + DUMP_SECONDS
    before: list[int] = []
    while time.monotonic() < deadline:
        files = [dump for process, dump in dumps.items() if not is_gone(process)]
        sizes = [dump.stat().st_size if dump.exists() else 0 for dump in files]
        if all(sizes) and sizes == before:
            return
        before = sizes
        time.sleep(SETTLE_SECONDS)


def _read(dump: Path) -> str:
    try:
        return dump.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _record(rank: int, snapshot: Snapshot) -> str:
    """The content of a rank's flight recorder, latest entry first."""
    now = time.monotonic()
    lines = [f"rank {rank}, process {snapshot.pid}, {snapshot.phase} {snapshot.step}", ""]
    for entry in reversed(snapshot.entries[-LISTED:]):
        ends = "->".join(map(str, entry.channel.ranks)) if entry.channel.directed else ""
        lines.append(
            f"{now - entry.time:9.3f} s ago  {entry.op} #{entry.number} of {entry.channel.group} {ends} "
            f"{entry.bytes} bytes  {shown(entry.where)}"
        )
    return "\n".join([*lines, ""])
