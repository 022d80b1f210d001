"""The ranks' state from one look of the watchdog to the next; only changes are processed, because thousands of ranks
may be waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import is_not

from shoal.observe.flight_recorder import Channel, Snapshot
from shoal.train.guard.stalls import Late, late_collective


@dataclass
class ProgressTracker:
    """What the last look showed."""

    snapshots: Sequence[Snapshot] = ()
    phases: frozenset[str] = frozenset()
    moved: bool = False  # whether any rank made progress since the previous look
    waiting: dict[int, float] = field(
        default_factory=dict
    )  # seconds since that look, by rank: see Snapshot.starved
    _late: dict[Channel, Late] = field(default_factory=dict)

    @property
    def late(self) -> list[Late]:
        return [*self._late.values()]

    def take(self, snapshots: Sequence[Snapshot]) -> None:
        """``snapshots``, in rank order; ranks without news may be the same objects as before."""
        before, self.snapshots = self.snapshots, snapshots
        if len(before) != len(snapshots):
            self.moved, self.waiting, self._late = True, {}, {}
            self._count(dict.fromkeys(channel for one in snapshots for channel in one.counts))
            self.phases = frozenset(one.phase for one in snapshots)
            return
        ranks = compress(range(len(snapshots)), map(is_not, before, snapshots))
        changed = [(rank, before[rank], snapshots[rank]) for rank in ranks]
        self.waiting = {
            rank: new.starved - old.starved
            for rank, old, new in changed
            if new.pid == old.pid and new.starved != old.starved
        }
        self.moved = any(_progress(old) != _progress(new) for _, old, new in changed)
        if self.moved:
            self.phases = frozenset(one.phase for one in snapshots)
        entered = (
            channel
            for _, old, new in changed
            if old.counts != new.counts
            for channel in {**old.counts, **new.counts}
            if old.counts.get(channel) != new.counts.get(channel)
        )
        self._count(dict.fromkeys(entered))

    def _count(self, channels: Iterable[Channel]) -> None:
        for channel in channels:
            late = late_collective(channel, self.snapshots)
            if late is not None:
                self._late[channel] = late
            else:
                self._late.pop(channel, None)


def _progress(one: Snapshot) -> tuple[int, str, int]:
    return one.step, one.phase, sum(one.counts.values())
