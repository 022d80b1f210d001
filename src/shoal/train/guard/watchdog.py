"""The launcher's watch over its ranks: it reads their flight recorders, and says who keeps the others waiting.

It needs no help from a rank, and none of its locks: a rank may be stuck in C code, or not be running at all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.facts.redact import redact
from shoal.observe import nccl
from shoal.observe.flight import FIRST_STEP, INPUT, STEP, Channel, FlightReader, Snapshot
from shoal.train.guard import stalled
from shoal.train.guard.stacks import (
    Standing,
    ask_for_stacks,
    is_gone,
    is_stopped,
    main_thread,
    shown,
    state,
)
from shoal.train.guard.stalled import Late, Verdict
from shoal.train.rundir import RunDirectory

Explain = Callable[[Sequence[Snapshot], Mapping[int, Standing]], Verdict | None]

# Outside of these, what a rank does may take long.
WATCHED = (STEP, INPUT)

LOOK_SECONDS = 0.25
# Between two looks no more than this is counted: we may have been suspended, and the ranks with us.
MOST_AT_ONCE = 1.0
# Of torch's own timeout, after which a waiting rank gives up: we have to speak before.
BEFORE_TIMEOUT = 0.9
# A step may take so many times the longest one before it.
MUCH_LONGER = 10
# And a rank may keep others waiting for so many times the longest wait that ended well: some work is unevenly shared.
LONGER = 2
# How long we wait for the stacks of ranks.
DUMP_SECONDS = 3.0
SETTLE_SECONDS = 0.1
# A rank whose heart does not beat for so long, and that was not stopped, holds Python's lock.
HEARTBEAT_SECONDS = 2.0
# But before its peers give up we want to have said who it was.
OF_THE_LIMIT = 0.5
LISTEN_SECONDS = 0.05
# Collectives that are listed with a rank's stacks.
LISTED = 40


@dataclass(frozen=True)
class Limits:
    """Seconds that a rank may keep others waiting: within a step, and in phases that may take long."""

    step: float
    patient: float

    @classmethod
    def of(cls, stall: float, timeout: float) -> Limits:
        """A waiting rank gives up after ``timeout``, and then it is too late to ask who was missing."""
        step = max(1.0, min(stall, timeout / 2))
        return cls(step, max(step, timeout * BEFORE_TIMEOUT))


class Watchdog:
    """Watches the ranks of one machine. To be polled often; most polls do nothing."""

    def __init__(self, run: RunDirectory, world: int, limits: Limits) -> None:
        self.run, self.world, self.limits = run, world, limits
        self.readers = [FlightReader(run.flight(rank)) for rank in range(world)]
        self._looked = time.monotonic()
        self._judged: list[int] = []
        self._forget()

    def _forget(self) -> None:
        self._waited: dict[tuple[Channel, int], float] = {}
        self._progress: list[tuple[int, str, int]] = []
        self._quiet = self._in_step = self._longest = 0.0
        # The longest wait that ended well in the first step, which may compile, and after it.
        self._first_wait = self._wait = 0.0

    def poll(self, processes: Sequence[int]) -> Verdict | None:
        """A verdict where the ranks, whose processes these are, have stalled; at most one for the same processes."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return None
        passed, self._looked = min(now - self._looked, MOST_AT_ONCE), now
        snapshots = self._look(processes)
        if snapshots is None or list(processes) == self._judged:
            self._forget()
            return None
        self._count(passed, snapshots)
        explain = self._stall(snapshots, processes)
        last = self._look(processes, entries=True) if explain else None
        if explain is None or last is None:
            return None
        verdict = explain(last, dump_stacks(self.run, last, self._locked(last)))
        if verdict is None:
            return None
        self._judged = list(processes)
        message = (
            f"{verdict.message}\n  stacks and last collectives of all ranks: {shown(str(self.run.stacks))}"
        )
        return replace(verdict, message=message)

    def _look(self, processes: Sequence[int], entries: bool = False) -> list[Snapshot] | None:
        """Of all ranks; None while some process has not begun or has ended: then its record means nothing."""
        seen = [reader.look(entries) for reader in self.readers]
        snapshots = [snapshot for snapshot in seen if snapshot is not None]
        ours = [one.pid for one in snapshots] == list(processes)
        return snapshots if ours and not any(map(is_gone, processes)) else None

    def _locked(self, snapshots: Sequence[Snapshot]) -> set[int]:
        """The ranks whose heart does not beat although nobody has stopped them."""
        silent = {rank for rank, one in enumerate(snapshots) if one.beats and not is_stopped(one.pid)}
        deadline = time.monotonic() + min(HEARTBEAT_SECONDS, self.limits.step * OF_THE_LIMIT)
        while silent and time.monotonic() < deadline:
            time.sleep(LISTEN_SECONDS)
            for rank in [*silent]:
                now = self.readers[rank].look()
                if now is None or now.beats != snapshots[rank].beats:
                    silent.remove(rank)
        return silent

    # Whether.

    def _count(self, passed: float, snapshots: list[Snapshot]) -> None:
        """Count for how long each late collective is late, and for how long nothing has happened at all."""
        late = [(one.channel, one.number) for one in stalled.late_collectives(snapshots)]
        over = [seconds for key, seconds in self._waited.items() if key not in late]
        phases = {phase for _, phase, _ in self._progress}
        if phases <= {FIRST_STEP, *WATCHED}:
            self._first_wait = max([self._first_wait, *over])
        if phases <= set(WATCHED):
            self._wait = max([self._wait, *over])
        self._waited = {key: self._waited.get(key, 0.0) + passed for key in late}
        progress = [(one.step, one.phase, sum(one.counts.values())) for one in snapshots]
        self._quiet = self._quiet + passed if progress == self._progress else 0.0
        self._in_step += passed
        if self._progress and progress[0][0] != self._progress[0][0]:
            # Once a second step has passed, it is not needed to know what the first one was like.
            self._first_wait = 0.0 if self._longest else self._first_wait
            self._longest, self._in_step = max(self._longest, self._in_step), 0.0
        self._progress = progress

    def _stall(self, snapshots: list[Snapshot], processes: Sequence[int]) -> Explain | None:
        """How to explain the stall, if there is one."""
        if any(seconds >= self._limit(channel, snapshots) for (channel, _), seconds in self._waited.items()):
            return partial(_explain_late, self._waited)
        phases = {snapshot.phase for snapshot in snapshots}
        # While there is no input nobody is to blame: a file system that does not answer is no better in a new process.
        if phases == {STEP} and self._quiet >= max(self.limits.patient, MUCH_LONGER * self._longest):
            return partial(stalled.explain_silence, self._quiet)
        if phases <= set(WATCHED) and self._quiet >= self.limits.step:
            if any(is_stopped(process) for process in processes):
                return partial(stalled.explain_silence, self._quiet)
            last = self._look(processes, entries=True) or []
            for channel in dict.fromkeys(channel for one in last for channel in one.counts):
                if difference := stalled.first_difference(last, channel):
                    return partial(stalled.explain_difference, channel, difference)
        return None

    def _limit(self, channel: Channel, snapshots: list[Snapshot]) -> float:
        if not all(snapshots[rank].phase in WATCHED for rank in channel.ranks):
            return self.limits.patient
        usual = LONGER * max(self._first_wait, self._wait)
        return min(max(self.limits.step, usual), self.limits.patient)


def _explain_late(
    waited: dict[tuple[Channel, int], float], snapshots: Sequence[Snapshot], standings: Mapping[int, Standing]
) -> Verdict | None:
    """None where the last one has come at the last moment."""

    def seconds(late: Late) -> float:
        return waited.get((late.channel, late.number), 0.0)

    late = sorted(stalled.late_collectives(snapshots), key=seconds, reverse=True)
    if not late:
        return None
    longest = max(map(seconds, late))
    cause = stalled.root(late, standings)
    if any(one.stopped for one in standings.values()) and not standings[cause.missing[0]].stopped:
        # It has entered all that the others have, and was stopped inside.
        return stalled.explain_silence(longest, snapshots, standings)
    return stalled.explain_late(cause, late, longest, snapshots, standings)


# The evidence.


def dump_stacks(run: RunDirectory, snapshots: Sequence[Snapshot], locked: set[int]) -> dict[int, Standing]:
    """Have every rank write down its stacks, and keep them in the run's directory; where each of them stands."""
    stopped = {rank for rank, one in enumerate(snapshots) if is_stopped(one.pid)}
    # Before anybody is disturbed.
    states = [state(one.pid) for one in snapshots]
    running = set(range(len(snapshots))) - stopped
    heard = [rank for rank in running if nccl.ask(run.flights, rank)]
    # A process that was stopped writes when it goes on. It goes on last, and not for long: others have been asked.
    for ranks in (running, stopped):
        for rank in ranks:
            ask_for_stacks(snapshots[rank].pid)
        for rank in ranks & stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(snapshots[rank].pid, signal.SIGCONT)
        _wait_for([run.stack_dump(rank) for rank in ranks])
    _wait_for([nccl.dump_of(run.flights, rank) for rank in heard])
    standings = {}
    for rank, snapshot in enumerate(snapshots):
        dump = _read(run.stack_dump(rank))
        frames = main_thread(dump, snapshot.main_thread)
        unfinished = _unfinished(run, rank, snapshot)
        device = f"its device has not finished {unfinished[0]}" if unfinished else ""
        standings[rank] = Standing(frames, rank in stopped, rank in locked, states[rank], device)
        on_device = [f"not finished on the device: {one}" for one in unfinished[:LISTED]]
        text = "\n".join([_record(rank, snapshot), *on_device, dump or "it wrote no stacks"])
        # Without a place for the evidence there is still a verdict.
        with contextlib.suppress(OSError):
            run.stacks.mkdir(mode=0o700, exist_ok=True)
            (run.stacks / f"rank-{rank:05d}.txt").write_text(redact(text), encoding="utf-8")
    return standings


def _unfinished(run: RunDirectory, rank: int, snapshot: Snapshot) -> list[str]:
    """What a rank's device was asked for and has not done, the oldest first."""
    names = {channel.id: channel.group for channel in snapshot.counts}
    return [
        f"{one.op} #{one.number} of group {names.get(one.group, one.group)} (by torch's count)"
        for one in nccl.pending(nccl.dump_of(run.flights, rank))
    ]


def _wait_for(dumps: Sequence[Path]) -> None:
    """Until all of these files have content that no longer grows."""
    deadline = time.monotonic() + DUMP_SECONDS
    before: list[int] = []
    while dumps and time.monotonic() < deadline:
        sizes = [dump.stat().st_size if dump.exists() else 0 for dump in dumps]
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
    """What the flight recorder of a rank holds, the last entry first."""
    now = time.monotonic()
    lines = [f"rank {rank}, process {snapshot.pid}, {snapshot.phase} {snapshot.step}", ""]
    for entry in reversed(snapshot.entries[-LISTED:]):
        ends = "->".join(map(str, entry.channel.ranks)) if entry.channel.directed else ""
        lines.append(
            f"{now - entry.time:9.3f} s ago  {entry.op} #{entry.number} of {entry.channel.group} {ends} "
            f"{entry.bytes} bytes  {shown(entry.where)}"
        )
    return "\n".join([*lines, ""])
