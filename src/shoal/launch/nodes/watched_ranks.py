"""The ranks of all nodes as the leader's watchdog sees them: its own, and those that other launchers report.

With up to a few hundred ranks every launcher reports what their flight recorders show, four times a second. With more,
the leader could not keep up: then a launcher only reports whether its ranks make progress. Once any rank of any node
has made none for a quarter of the limit, all nodes report details until they progress again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from shoal.launch.nodes.last_reports import Leader
from shoal.launch.nodes.messages import Round, Status
from shoal.observe.flight_recorder import Snapshot
from shoal.train.guard.stacks import Standing
from shoal.train.guard.watchdog import Limits
from shoal.train.guard.watched_ranks import DUMP_SECONDS, LocalRanks

# Reports older than this many seconds, or than the next number of exchanges, say nothing about ranks.
OLD_SECONDS = 1.0
OLD_EXCHANGES = 4
# How many of a rank's last collectives are reported to the leader; and how many if there are many ranks.
TOLD, TOLD_OF_MANY = 16, 4
# Up to this many ranks are always reported individually.
ALWAYS = 256
# How long one look waits for reports of other nodes; it asks several times, and waits between two exchanges.
ONE_LOOK = 0.1
# Time that a rank waited for a processor is reported in this unit. It must be shorter than the interval between looks
# to count.
STARVED_SECONDS = 0.1
# Fraction of the limit: a rank without progress for this long makes the leader ask for all details.
SUSPICIOUS = 0.25


def remaining(limits: Limits, world: int) -> Limits:
    """What is left of the limits once details are reported, because the watchdog counts only from then on."""
    before = limits.step * SUSPICIOUS if world > ALWAYS else 0.0
    return Limits(limits.step - before, limits.patient - before)


class RankProgress:
    """Whether ranks of this machine progress from one look to the next."""

    def __init__(self, quarter: float) -> None:
        """``quarter``: a quarter of the limit, in seconds."""
        self.quarter = quarter
        self._since: dict[int, tuple[tuple[int, str, int], float]] = {}

    def still(self, seen: Sequence[Snapshot] | None) -> int:
        """1 if a rank has made no progress for a quarter of the limit, else 0; -1 if not all of them are there."""
        if not seen:
            self._since.clear()
            return -1
        now = time.monotonic()
        for one in seen:
            done = one.step, one.phase, sum(one.counts.values())
            if self._since.get(one.pid, ((0, "", -1), 0.0))[0] != done:
                self._since[one.pid] = done, now
        return int(now - min(self._since[one.pid][1] for one in seen) >= self.quarter)


class EveryRank:
    """All nodes' ranks, for the leader."""

    def __init__(
        self, leader: Leader, round: Round, local: LocalRanks, quarter: float = 1.0, world: int = 0
    ) -> None:
        """``quarter``: a quarter of the limit, in seconds. ``world``: the number of ranks."""
        self.leader, self.round, self.local = leader, round, local
        self.large = world > ALWAYS
        self.progress = RankProgress(quarter)
        self._asked, self._others_then = (0.0, -1), list[Status]()
        # Each node's last report, and its parsed snapshots: of thousands of nodes, few report anything new.
        self._told: dict[int, tuple[dict[int, dict[str, Any]], list[Snapshot]]] = {}
        leader.command(details=not self.large)

    def progressing(self) -> bool:
        """Whether every rank of many is known to progress, so there is nothing to look at. Otherwise all nodes are
        asked.
        """
        if not self.large:
            return False
        mine = self.progress.still(self.local.look())
        still = [mine, *(status.still for status in self._others())]
        wanted = min(still) >= 0 and max(still) > 0  # before all have started, there is nothing to compare
        if wanted != self.leader.call.details:
            self.leader.command(details=wanted)
        return not any(still)

    def look(self, entries: bool = False) -> list[Snapshot] | None:
        """Snapshots in rank order, which is node order; None if a node shows nothing."""
        mine, others = self.local.look(entries), [status.seen for status in self._others()]
        if mine is None or not all(others):
            return None
        found = [*mine]
        for place, seen in enumerate(others):
            before = self._told.get(place)
            if before is None or before[0] is not seen:
                rows = [Snapshot.from_json(row) for _, row in sorted(seen.items())]
                before = self._told[place] = seen, rows
            found += before[1]
        return found

    def any_stopped(self) -> bool:
        return self.local.any_stopped() or any(status.stopped for status in self._others())

    def evidence(self, snapshots: Sequence[Snapshot], patience: float) -> dict[int, Standing]:
        """Other nodes dump their stacks while ours do."""
        workload = self.leader.call.ask + 1
        self.leader.command(ask=workload)
        here = len(self.local.readers)
        standings = self.local.evidence(snapshots[:here], patience)

        def answered() -> bool:
            # Once a rank of ours is gone, there is nothing to wait for: the attempt is over.
            return all(one.answered >= workload for one in self._others()) or self.local.look() is None

        self.leader.wait(answered, DUMP_SECONDS)
        for status in self._others():
            standings |= {rank: Standing.from_json(row) for rank, row in status.standings.items()}
        return standings

    def _others(self) -> list[Status]:
        """The other nodes' statuses for this round; nodes that are silent or in another round give an empty one."""
        now, exchanges = time.monotonic(), self.leader.exchanges
        if exchanges == self._asked[1] and now - self._asked[0] < ONE_LOOK:
            return self._others_then
        nothing = Status(name="", host="", process=0, devices=0, still=-1)
        old = max(OLD_SECONDS, OLD_EXCHANGES * self.leader.tick)
        found = []
        for number in self.round.nodes[1:]:
            told = self.leader.last_of(number)
            fresh = self.leader.silent_for(number) < old
            found.append(told if told is not None and fresh and told.round == self.round.number else nothing)
        self._asked, self._others_then = (now, exchanges), found
        return found


class RankReporter:
    """For a follower: reports on its ranks, and answers questions."""

    def __init__(
        self, local: LocalRanks, patience: float, asked: int, quarter: float = 1.0, world: int = 0
    ) -> None:
        """``asked``: how many questions about earlier rounds the leader has asked. ``quarter``: a quarter of the limit,
        in seconds.

        ``world``: the number of ranks.
        """
        self.local, self.patience = local, patience
        self.told = TOLD_OF_MANY if world > ALWAYS else TOLD
        self.answered = asked
        self.progress = RankProgress(quarter)

    def tell(self, asked: int, details: bool = True) -> dict[str, Any]:
        """Changed fields of a status. ``details``: include what the recorders show."""
        details = details or asked > self.answered
        ranks, seen = self.local.readers, self.local.look(entries=details) or []
        brief = [self._brief(one).as_json() for one in seen] if details else []
        told: dict[str, Any] = {
            "seen": dict(zip(ranks, brief, strict=False)),
            "still": self.progress.still(seen),
            "stopped": self.local.any_stopped(),
        }
        if asked > self.answered:
            self.answered = asked
            standings = self.local.evidence(seen, self.patience) if seen else {}
            told["standings"] = {rank: asdict(standing) for rank, standing in standings.items()}
            told["answered"] = asked
        return told

    def _brief(self, one: Snapshot) -> Snapshot:
        """Without fields that change even when nothing happens: waiting ranks have nothing new to report."""
        starved = one.starved // STARVED_SECONDS * STARVED_SECONDS
        return replace(one, entries=one.entries[-self.told :], beats=0, starved=starved)
