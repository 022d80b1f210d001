"""The ranks of all nodes as the leader's watchdog sees them: its own, and those that other launchers report.

Of a few hundred ranks every launcher reports what their flight recorders show, four times a second. Of more, the leader
could not keep up with that: there a launcher only says whether its ranks make progress. Once some rank of any node has
made none for a quarter of the limit, all tell what they see, until they progress again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from shoal.launch.nodes.hearing import Leader
from shoal.launch.nodes.messages import Round, Status
from shoal.observe.flight_recorder import Snapshot
from shoal.train.guard.stacks import Standing
from shoal.train.guard.watchdog import Limits
from shoal.train.guard.watched_ranks import DUMP_SECONDS, LocalRanks

# What a node said longer ago says nothing of its ranks; nor what it said so many exchanges ago.
OLD_SECONDS = 1.0
OLD_EXCHANGES = 4
# Of a rank's last collectives, so many are told to the leader; and where there are many ranks.
TOLD, TOLD_OF_MANY = 16, 4
# Of up to so many ranks every one is reported at all times.
ALWAYS = 256
# What is heard of other nodes in one look, which asks several times, and between two exchanges.
ONE_LOOK = 0.1
# A rank that had to wait for a processor says so by as much. Less than between two looks, or none of those would count.
STARVED_SECONDS = 0.1
# Of the limit: a rank that makes no progress for so long has the leader ask for all that is known.
SUSPICIOUS = 0.25


def remaining(limits: Limits, world: int) -> Limits:
    """What is left of the limits once ranks are told of, for the watchdog only counts from then on."""
    before = limits.step * SUSPICIOUS if world > ALWAYS else 0.0
    return Limits(limits.step - before, limits.patient - before)


class RankProgress:
    """Whether ranks of this machine make any, from one look to the next."""

    def __init__(self, quarter: float) -> None:
        """``quarter``: seconds, a fourth of the limit."""
        self.quarter = quarter
        self._since: dict[int, tuple[tuple[int, str, int], float]] = {}

    def still(self, seen: Sequence[Snapshot] | None) -> int:
        """1 where some rank has made none for a quarter, else 0; -1 where not all of them are there."""
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
    """For the leader."""

    def __init__(
        self, leader: Leader, round: Round, local: LocalRanks, quarter: float = 1.0, world: int = 0
    ) -> None:
        """``quarter``: of the limit, seconds. ``world``: how many ranks there are."""
        self.leader, self.round, self.local = leader, round, local
        self.large = world > ALWAYS
        self.progress = RankProgress(quarter)
        self._asked, self._others_then = (0.0, -1), list[Status]()
        # Of each node what it told last, and what that says: of thousands, few have told anything new.
        self._told: dict[int, tuple[dict[int, dict[str, Any]], list[Snapshot]]] = {}
        leader.command(details=not self.large)

    def progressing(self) -> bool:
        """Whether there is nothing to look at: every rank of many is known to make progress. Else all are asked."""
        if not self.large:
            return False
        mine = self.progress.still(self.local.look())
        still = [mine, *(status.still for status in self._others())]
        wanted = min(still) >= 0 and max(still) > 0  # before all have begun, there is nothing to compare
        if wanted != self.leader.call.details:
            self.leader.command(details=wanted)
        return not any(still)

    def look(self, entries: bool = False) -> list[Snapshot] | None:
        """In the order of ranks, which is that of nodes; None where some node shows nothing."""
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
        """The others are asked, and write down their stacks while ours do."""
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
        """What the other nodes say of this round; nothing of one that says nothing of it, or that is not heard from."""
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
    """For a launcher that follows: tells of its ranks, and answers questions."""

    def __init__(
        self, local: LocalRanks, patience: float, asked: int, quarter: float = 1.0, world: int = 0
    ) -> None:
        """``asked``: how often the leader has asked before, about others. ``quarter``: of the limit, seconds.

        ``world``: how many ranks there are.
        """
        self.local, self.patience = local, patience
        self.told = TOLD_OF_MANY if world > ALWAYS else TOLD
        self.answered = asked
        self.progress = RankProgress(quarter)

    def tell(self, asked: int, details: bool = True) -> dict[str, Any]:
        """What has changed of a status. ``details``: what the recorders show as well."""
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
        """Without what changes at all times while nothing happens: ranks that wait have nothing new to tell."""
        starved = one.starved // STARVED_SECONDS * STARVED_SECONDS
        return replace(one, entries=one.entries[-self.told :], beats=0, starved=starved)
