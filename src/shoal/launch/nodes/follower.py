"""A launcher that follows: runs its node's ranks as the leader says, and reports on them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.facts.cluster import Cluster
from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput
from shoal.facts.traffic import name_ranks
from shoal.launch.agent import WorkerProcesses
from shoal.launch.interfaces import address_of
from shoal.launch.nodes.exchange import Follower
from shoal.launch.nodes.meeting import LeaderLost, MeetingPoint
from shoal.launch.nodes.messages import End, Round, Status
from shoal.launch.nodes.watched_ranks import SUSPICIOUS, RankReporter
from shoal.launch.rendezvous import Rendezvous, connect
from shoal.launch.report import BAD_INPUT, FAILED, Report
from shoal.launch.restart import GaveUp, Interrupted
from shoal.launch.supervisor import Supervisor
from shoal.plan.resolve import Job
from shoal.train.guard.watchdog import OF_THE_LIMIT, Limits
from shoal.train.guard.watched_ranks import LocalRanks

# Seconds between two looks at the ranks' flight recorders.
WITNESS_SECONDS = 0.25
# How long the agent may take to end once the leader is lost: it may hang in a broken connection.
ABANDON_SECONDS = 3.0


class Ended(Exception):
    """The leader says that the run is over."""

    def __init__(self, end: End) -> None:
        self.end = end
        super().__init__(end.message)


class FollowerSupervisor(Supervisor):
    """``shoal train --nodes`` on a node whose leader is elsewhere."""

    leads = False

    def __init__(self, place: MeetingPoint, status: Status, job: Job, *rest: Any) -> None:
        self.place, self.wanted, self._status = place, job, status
        self._index = 0
        self._witness: RankReporter | None = None
        self._witnessed = 0.0
        self._over_at = 0.0  # when there was nothing left to do
        self._took_part = False
        super().__init__(job, *rest)

    def _meet(self) -> Rendezvous:
        timeout = self.job.config.fault.timeout
        talking = self.place.connect()
        if talking is None:
            raise LeaderLost
        try:
            store = connect(self.place.port, talking.secret, timeout, self.place.address)
            address = address_of(self.job.config.cluster.interface)
            self.follower = Follower(talking, self._status, timeout, address)
        except RuntimeError:  # torch's error
            raise LeaderLost from None
        self.follower.start()
        name, place = self.run.path.name, self.place
        return Rendezvous(name, store, place.address, place.port, self.next_round, self._stay)

    # A round.

    def next_round(self, number: int) -> tuple[int, int, int]:
        """Wait for a round ``number`` or later that this node takes part in; its workers, if any, have ended."""
        follower = self.follower
        deaths, devices = tuple(self.agent.crew.deaths()), self.devices() or 1
        step = max(map(self._step_of, self.agent.crew.processes), default=0)
        follower.say(
            ready=number, deaths=deaths, step=step, devices=devices, seen={}, still=-1, stopped=False
        )
        follower.wait(
            lambda: self._something_to_do() is not None or (bool(self.asked) and not self._took_part)
        )
        todo = self._something_to_do()
        if todo is None:
            raise Interrupted
        if isinstance(todo, BaseException):
            raise todo
        self._took_part = True
        self._index = todo.nodes.index(follower.number)
        cluster = Cluster.model_validate(todo.cluster)
        job = replace(self.wanted, cluster=cluster, layout=Layout.parse(todo.layout))
        self._assign(job, todo.number, len(todo.nodes), todo.attempt, todo.set_aside)
        self.agent.crew = WorkerProcesses()  # earlier deaths no longer matter
        follower.say(ready=0, round=todo.number, deaths=(), failed=False, seen={}, still=-1, standings={})
        ranks = name_ranks(self._my_ranks())
        self.progress.say(f"node {self._status.name}: {ranks} of {job.layout}, led from {self.place.host}")
        return todo.number, self._index, len(todo.nodes)

    def _something_to_do(self) -> Round | Exception | None:
        """What the leader wants of this node; None if nothing."""
        follower, call = self.follower, self.follower.call
        if (over := self.over()) is not None:
            return over
        if call.over >= follower.status.ready:
            follower.say(ready=call.over + 1)  # that round is over, and this node did not take part in it
        round = call.round
        fresh = round is not None and round.number > max(call.over, self.rendezvous.round)
        return round if round is not None and fresh and follower.number in round.nodes else None

    def over(self) -> Exception | None:
        """Why this node has nothing left to do; None while it may have."""
        call = self.follower.call
        if why := call.refused.get(self.follower.number):
            return BadInput(
                why, "the same command, data and versions on each node; and a name for each, --node NAME"
            )
        if call.end is not None:
            return Ended(call.end)
        return LeaderLost() if self.follower.lost else None

    def _stay(self) -> None:
        if (over := self.over()) is not None:
            raise over

    def _my_ranks(self) -> range:
        here = self.spec.local_world_size
        return range(self._index * here, (self._index + 1) * here)

    def _watch_over(self, limits: Limits) -> None:
        """Report on the ranks: the watchdog is the leader's."""
        local = LocalRanks(self.run, self._my_ranks(), self.agent.processes)
        quarter, world = limits.step * SUSPICIOUS, self.job.layout.world
        self._witness = RankReporter(
            local, limits.step * OF_THE_LIMIT, self.follower.call.ask, quarter, world
        )

    def _my_logs(self) -> list[Path] | None:
        return [self.run.log(rank) for rank in self._my_ranks()] if self._took_part else []

    # While workers run.

    def _look_around(self) -> None:
        crew, call, follower = self.agent.crew, self.follower.call, self.follower
        if call.end is not None and not follower.status.heard_end:
            follower.say(heard_end=True)
        if follower.lost or call.over >= self.rendezvous.round:
            self.agent.kill(crew)
        if follower.lost or call.end is not None:
            self._over_at = self._over_at or time.monotonic()
        if crew.first_death is not None and not follower.status.failed:
            follower.say(failed=True)
        asked = self._witness is not None and call.ask > self._witness.answered
        if self._witness is not None and (asked or time.monotonic() - self._witnessed >= WITNESS_SECONDS):
            self._witnessed = time.monotonic()
            follower.say(**self._witness.tell(call.ask, call.details))

    def _ask_to_stop(self) -> None:
        """Ask the leader to stop the run, if this node takes part in it; a node that only waits just leaves."""
        self.follower.say(stop=self._took_part)

    def _goes_on(self) -> bool:
        """Always True: the leader decides when it is over."""
        return True

    # Ending.

    def _is_hopeless(self) -> bool:
        return bool(self._over_at) and time.monotonic() - self._over_at > ABANDON_SECONDS

    def _end_workers(self, thread: threading.Thread) -> None:
        self.agent.kill()
        thread.join(ABANDON_SECONDS)

    def _verdict(self) -> Report:
        follower = self.follower
        if self.insisted or isinstance(self.error, (Interrupted, GaveUp)):
            return super()._verdict()
        # The agent may have hit a broken connection that the exchange thread has not noticed yet.
        follower.wait(lambda: self.over() is not None, follower.patience)
        over = self.over() or LeaderLost()
        if not isinstance(over, Ended):
            raise over
        if over.end.code == BAD_INPUT:
            raise BadInput(over.end.message)
        if over.end.code != FAILED and not over.end.uncommitted:
            self.run.forget_memory()
        return self._report(over.end.code, over.end.message)

    def run_to_end(self) -> Report:
        try:
            return super().run_to_end()
        finally:
            self.run.forget_flights()
            self.follower.say(heard_end=True, ready=0)
            self.follower.close()
