"""The launcher's watchdog: reads the ranks' flight recorders and names the rank that stalls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shoal.observe.flight_recorder import FIRST_STEP, INPUT, STEP, Channel, Snapshot
from shoal.train.guard import stalls
from shoal.train.guard.progress import ProgressTracker
from shoal.train.guard.stacks import Standing
from shoal.train.guard.stalls import Late, StallVerdict
from shoal.train.guard.watched_ranks import WatchedRanks

Explain = Callable[[Sequence[Snapshot], Mapping[int, Standing]], StallVerdict | None]

# Phases with a time limit; others may take long.
WATCHED = (STEP, INPUT)

LOOK_SECONDS = 0.25
# The most time counted between two polls: we may have been suspended, and the ranks with us.
MOST_AT_ONCE = 1.0
# Fraction of torch's own timeout, after which waiting ranks abort: report before that.
BEFORE_TIMEOUT = 0.9
# A step may take this many times as long as the longest one before it.
MUCH_LONGER = 10
# And a rank may keep others waiting this many times as long as the longest wait that ended well: some work is uneven.
LONGER = 2
# Seconds that messages to and from ranks on other nodes take longer.
TO_ASK_OTHERS = 0.5
# Fraction of the limit spent listening for heartbeats: the culprit should be named before its peers abort.
OF_THE_LIMIT = 0.5


@dataclass(frozen=True)
class Limits:
    """Seconds that a rank may keep others waiting: within a step, and in phases that may take long."""

    step: float
    patient: float

    @classmethod
    def of(cls, stall: float, timeout: float, nodes: int = 1) -> Limits:
        """Waiting ranks abort after ``timeout``, and then it is too late to ask which rank was missing."""
        asking = TO_ASK_OTHERS if nodes > 1 else 0.0
        step = max(1.0, min(stall, timeout / 2 - asking))
        return cls(step, max(step, timeout * BEFORE_TIMEOUT - 3 * asking))


class Watchdog:
    """Watches the ranks of one attempt. Poll it often; most polls do nothing."""

    def __init__(self, ranks: WatchedRanks, limits: Limits) -> None:
        self.ranks, self.limits = ranks, limits
        self._looked = time.monotonic()
        self._judged: list[int] = []
        self._forget()

    def _forget(self) -> None:
        self._waited: dict[tuple[Channel, int], float] = {}
        self._looks = ProgressTracker()
        self._quiet = self._in_step = self._longest = 0.0
        # The longest wait that ended well, in the first step, which may compile, and in later ones.
        self._first_wait = self._wait = 0.0

    def poll(self) -> StallVerdict | None:
        """A verdict if the ranks have stalled; at most one for the same processes."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return None
        passed, self._looked = min(now - self._looked, MOST_AT_ONCE), now
        if self.ranks.progressing():
            self._ended_well()
            return None
        snapshots = self.ranks.look()
        if snapshots is None or (self._judged and [one.pid for one in snapshots] == self._judged):
            self._forget()
            return None
        self._count(passed, snapshots)
        explain = self._stall(snapshots)
        last = self.ranks.look(entries=True) if explain else None
        if explain is None or last is None:
            return None
        found = self.ranks.evidence(last, self.limits.step * OF_THE_LIMIT)
        if len(found) < len(last) and self.ranks.look() is None:
            # A rank has aborted meanwhile, and not all were heard: the culprit may be among the others.
            return None
        verdict = explain(last, {rank: found.get(rank, Standing()) for rank in range(len(last))})
        if verdict is not None:
            self._judged = [one.pid for one in last]
        return verdict

    # Detection.

    def _ended_well(self) -> None:
        """A wait has ended well. With many ranks the phase it happened in is unknown, so it counts for any."""
        self._wait = max([self._wait, *self._waited.values()])
        self._waited, self._looks, self._quiet = {}, ProgressTracker(), 0.0

    def _count(self, passed: float, snapshots: list[Snapshot]) -> None:
        """Count how long each late collective has been late, and how long nothing has happened at all.

        Time in which the missing ranks were ready to run but others had the processors does not count: on a busy
        machine they arrive late, but they arrive.
        """
        looks, phases = self._looks, self._looks.phases
        step = looks.snapshots[0].step if looks.snapshots else snapshots[0].step
        looks.take(snapshots)
        found, waiting = looks.late, looks.waiting
        late = {(one.channel, one.number) for one in found}
        held = max((waiting.get(rank, 0.0) for one in found for rank in one.missing), default=0.0)
        kept = max(0.0, passed - held)
        over = [seconds for key, seconds in self._waited.items() if key not in late]
        if phases <= {FIRST_STEP, *WATCHED}:
            self._first_wait = max([self._first_wait, *over])
        if phases <= set(WATCHED):
            self._wait = max([self._wait, *over])
        self._waited = {key: self._waited.get(key, 0.0) + kept for key in late}
        quiet = max(0.0, passed - max(waiting.values(), default=0.0))
        self._quiet = 0.0 if looks.moved else self._quiet + quiet
        self._in_step += passed
        if snapshots[0].step != step:
            # After a second step, the first one's waits no longer matter.
            self._first_wait = 0.0 if self._longest else self._first_wait
            self._longest, self._in_step = max(self._longest, self._in_step), 0.0

    def _stall(self, snapshots: list[Snapshot]) -> Explain | None:
        """How to explain the stall, if there is one."""
        if any(seconds >= self._limit(channel, snapshots) for (channel, _), seconds in self._waited.items()):
            return partial(_explain_late, self._waited)
        phases = self._looks.phases
        # When all wait for input no rank is to blame: a file system that hangs would not be better in a new process.
        if phases == {STEP} and self._quiet >= max(self.limits.patient, MUCH_LONGER * self._longest):
            return partial(stalls.explain_silence, self._quiet)
        if phases <= set(WATCHED) and self._quiet >= self.limits.step:
            if self.ranks.any_stopped():
                return partial(stalls.explain_silence, self._quiet)
            last = self.ranks.look(entries=True) or []
            for channel in dict.fromkeys(channel for one in last for channel in one.counts):
                if difference := stalls.first_difference(last, channel):
                    return partial(stalls.explain_difference, channel, difference)
        return None

    def _limit(self, channel: Channel, snapshots: list[Snapshot]) -> float:
        busy = not self._looks.phases <= set(WATCHED)
        if busy and not all(snapshots[rank].phase in WATCHED for rank in channel.ranks):
            return self.limits.patient
        usual = LONGER * max(self._first_wait, self._wait)
        return min(max(self.limits.step, usual), self.limits.patient)


def _explain_late(
    waited: dict[tuple[Channel, int], float], snapshots: Sequence[Snapshot], standings: Mapping[int, Standing]
) -> StallVerdict | None:
    """None if the last rank arrived at the last moment."""

    def seconds(late: Late) -> float:
        return waited.get((late.channel, late.number), 0.0)

    late = sorted(stalls.late_collectives(snapshots), key=seconds, reverse=True)
    if not late:
        return None
    longest = max(map(seconds, late))
    cause = stalls.root(late, standings)
    if any(one.stopped for one in standings.values()) and not standings[cause.missing[0]].stopped:
        # It has entered everything the others have, and was stopped inside.
        return stalls.explain_silence(longest, snapshots, standings)
    return stalls.explain_late(cause, late, longest, snapshots, standings)
