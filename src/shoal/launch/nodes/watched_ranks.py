"""The ranks of all nodes as the leader's watchdog sees them: its own, and those that other launchers report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from shoal.launch.nodes.meeting import Leader
from shoal.launch.nodes.messages import Round, Status
from shoal.observe.flight_recorder import Snapshot
from shoal.train.guard.stacks import Standing
from shoal.train.guard.watched_ranks import DUMP_SECONDS, LocalRanks

# What a node said longer ago says nothing of its ranks.
OLD_SECONDS = 1.0
# Of a rank's last collectives, so many are told to the leader.
TOLD = 16


class EveryRank:
    """For the leader."""

    def __init__(self, leader: Leader, round: Round, local: LocalRanks) -> None:
        self.leader, self.round, self.local = leader, round, local

    def look(self, entries: bool = False) -> list[Snapshot] | None:
        """In the order of ranks, which is that of nodes; None where some node shows nothing."""
        mine, others = self.local.look(entries), [status.seen for status in self._others()]
        if mine is None or not all(others):
            return None
        return mine + [Snapshot.from_json(row) for seen in others for _, row in sorted(seen.items())]

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
        nothing = Status(name="", host="", process=0, devices=0)
        found = []
        for number in self.round.nodes[1:]:
            told = self.leader.last_of(number)
            fresh = self.leader.silent_for(number) < OLD_SECONDS
            found.append(told if told is not None and fresh and told.round == self.round.number else nothing)
        return found


class RankReporter:
    """For a launcher that follows: tells of its ranks, and answers questions."""

    def __init__(self, local: LocalRanks, patience: float, asked: int) -> None:
        """``asked``: how often the leader has asked before, about others."""
        self.local, self.patience = local, patience
        self.answered = asked

    def tell(self, asked: int) -> dict[str, Any]:
        """What has changed of a status."""
        ranks, seen = self.local.readers, self.local.look(entries=True) or []
        brief = [replace(one, entries=one.entries[-TOLD:]).as_json() for one in seen]
        told: dict[str, Any] = {
            "seen": dict(zip(ranks, brief, strict=False)),
            "stopped": self.local.any_stopped(),
        }
        if asked > self.answered:
            self.answered = asked
            standings = self.local.evidence(seen, self.patience) if seen else {}
            told["standings"] = {rank: asdict(standing) for rank, standing in standings.items()}
            told["answered"] = asked
        return told
