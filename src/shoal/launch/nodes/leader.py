"""The launcher that leads: holds the run directory and the store, and decides which nodes join each round."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from shoal.facts.problem import BadInput
from shoal.facts.traffic import name_ranks
from shoal.launch.failure import NODE_LOST, Death, Failure
from shoal.launch.interfaces import address_of
from shoal.launch.manifest import describe_plan
from shoal.launch.nodes.count import NodeCount
from shoal.launch.nodes.last_reports import Leader
from shoal.launch.nodes.meet import Meet, given_secret
from shoal.launch.nodes.meeting import LeaderLost, new_meeting_point
from shoal.launch.nodes.messages import End, Round, Status
from shoal.launch.nodes.order import in_order
from shoal.launch.nodes.watched_ranks import ALWAYS, SUSPICIOUS, EveryRank, remaining
from shoal.launch.rendezvous import (
    REGROUP,
    Rendezvous,
    allow_connections,
    attempt_store,
    connect,
    open_store,
)
from shoal.launch.report import BAD_INPUT, Report
from shoal.launch.restart import GaveUp, Interrupted
from shoal.launch.supervisor import Supervisor
from shoal.parallel.signed_store import SignedStore, new_secret
from shoal.plan.refit import refit
from shoal.plan.resolve import Job
from shoal.train.guard.watchdog import Limits, Watchdog
from shoal.train.guard.watched_ranks import LocalRanks

# Seconds between two checks of who leads, according to the run directory, which may be slow to reach.
PLACE_SECONDS = 1.0
# How long nodes may take to end their workers, to which torch's agent gives 30 seconds.
SETTLE_SECONDS = 30.0
# How long a round waits for the nodes it needs.
JOIN_SECONDS = 600.0
# How long the others may take to learn that the run is over.
FAREWELL_SECONDS = 5.0
NOT_SHARED = "a directory that all nodes share: --run DIR; or a store for the state: --set checkpoint.to=s3://bucket/runs"


class LeaderSupervisor(Supervisor):
    """``shoal train --nodes`` on the node that holds the run directory. Its ranks come first."""

    def __init__(
        self,
        nodes: NodeCount,
        more_seconds: float,
        met: tuple[Meet, TCPStore, str] | None,
        status: Status,
        job: Job,
        *rest: Any,
    ) -> None:
        """``more_seconds``: how long the first round waits for more nodes than it needs.

        ``met``: where the others look for the leader, the store there, and the token that shows whether they see the
        state; None: they share the run directory.
        """
        self.met = met
        self.nodes, self.more_seconds, self.wanted = nodes, more_seconds, job
        self._status = status
        self._regrouped = False
        self._looked = 0.0
        self._heard = 0
        self._considered: set[frozenset[int]] = set()
        super().__init__(job, *rest)

    def _meet(self) -> Rendezvous:
        timeout = self.job.config.fault.timeout
        allow_connections()
        store, address, port = self._open(timeout)
        self.leader = Leader(connect(port, store.secret, timeout, address), self._status, timeout)
        self.leader.store.on_forgery(self._note_tampering)
        self.leader.start()
        self.place = new_meeting_point(address, port, store)
        self.place.write(self.run.path)
        if self.met is not None:
            meet, _, token = self.met
            meet.announce(store, self.place, self.run.id, token)
        return Rendezvous(self.run.path.name, store, address, port, self.begin_round)

    def _open(self, timeout: float) -> tuple[SignedStore, str, int]:
        if self.met is None:
            return open_store(address_of(self.job.config.cluster.interface), timeout)
        plain = self.met[1]
        return SignedStore(plain, given_secret() or new_secret(), timeout), plain.host, plain.port

    def run_to_end(self) -> Report:
        try:
            report = super().run_to_end()
            uncommitted = isinstance(self.error, Interrupted)
            self._say_farewell(End(message=report.message, code=report.code, uncommitted=uncommitted))
            return report
        finally:
            self.run.forget_flights()
            self.place.remove(self.run.path)
            self.leader.close()

    # A round.

    def begin_round(self, number: int) -> tuple[int, int, int]:
        """End the previous round, find out why it failed, gather nodes, and publish their work; this node is the
        first.
        """
        leader, ended = self.leader, self.leader.call.round
        set_aside: tuple[int, ...] = ()  # the other nodes have their own copies
        if ended is not None:
            leader.command(over=ended.number)
            # A node that does not end its workers in time is left out.
            patience = SETTLE_SECONDS + self.job.config.fault.timeout
            leader.wait(lambda: all(self._settled(node, ended) for node in ended.nodes[1:]), patience)
            if not self._regrouped:
                set_aside = self._judge(ended.number)
        self._regrouped = False
        leader.say(devices=self.devices() or 1)  # some may be gone
        there, job = self._gather_enough(first=ended is None)
        # Some numbers of nodes have no layout.
        taking_part = tuple(there)[: job.cluster.nodes if job is not self.wanted else len(there)]
        self._note_change(job, taking_part, ended)
        cluster = job.cluster.model_dump(mode="json")
        self._round = Round(
            number=number,
            nodes=taking_part,
            attempt=f"{self.name}-{number}",
            set_aside=set_aside,
            layout=str(job.layout),
            cluster=cluster,
        )
        self._assign(job, number, len(taking_part), self._round.attempt, set_aside)
        leader.command(round=self._round)
        return number, 0, len(taking_part)

    def _settled(self, node: int, ended: Round) -> bool:
        """Whether a node has no workers of that round left, or is lost."""
        status = self.leader.last_of(node)
        return status is None or status.ready > ended.number or self._is_lost(node)

    def _is_lost(self, node: int) -> bool:
        return node != self.leader.number and self.leader.silent_for(node) >= self.leader.patience

    def _ready(self) -> dict[int, Status]:
        """Nodes that could take part in a round, this one first."""
        mine = self.leader.number
        others = {number: one for number, one in self.leader.alive().items() if one.ready and number != mine}
        return {mine: self.leader.status, **others}

    def _gather_enough(self, first: bool) -> tuple[dict[int, Status], Job]:
        """As many nodes as needed, and the job on them. A model may need more than the user asked for."""
        least = self.nodes.least
        while True:
            there = self._gather(first, least)
            try:
                return there, self._laid_out(there)
            except BadInput:
                if len(there) >= self.nodes.most:
                    raise
                least = len(there) + 1

    def _gather(self, first: bool, least: int) -> dict[int, Status]:
        """Wait for ``least`` nodes; at the start a little longer, for more."""
        most = self.nodes.most
        began = time.monotonic()
        if len(self._ready()) < least:
            where = (
                f"at {self.met[0]}"
                if self.met
                else f"in {self.run.path}, which they have to share (or --meet)"
            )
            self.progress.say(f"waiting for nodes {where}: {len(self._ready())} of {least} are here")

        def gathered() -> bool:
            count = len(self._ready())
            more = first and count < most and time.monotonic() - began < self.more_seconds
            return bool(self.asked) or bool(self._trouble()) or (count >= least and not more)

        if not self.leader.wait(gathered, JOIN_SECONDS):
            # The run itself is fine: whatever provides nodes may have one later, and restart it.
            who = ", ".join(one.name for one in self._ready().values())
            raise Interrupted(f"{least} nodes did not join within {JOIN_SECONDS:.0f} s; joined: {who}")
        ready = self._ready()
        if len(ready) < least and not self.asked:
            raise BadInput(self._trouble(), NOT_SHARED)
        if len(ready) < least:
            raise Interrupted
        taken = {number: ready[number] for number in list(ready)[:most]}
        return in_order(self.leader.number, taken, self.wanted.cluster)

    def _trouble(self) -> str:
        """Why nodes that have come cannot take part, if the others are too few."""
        if len(self._ready()) >= self.nodes.least:
            return ""
        return next((one.trouble for one in self.leader.heard() if one.trouble), "")

    def _laid_out(self, there: dict[int, Status]) -> Job:
        """The requested layout if it fits these nodes; otherwise the planner chooses one that does."""
        count = len(there)
        room = count * min(status.devices for status in there.values())
        world = self.wanted.layout.world
        if world <= room and world % count == 0:
            return self.wanted
        return refit(self.wanted, room, count)

    def _note_change(self, job: Job, nodes: tuple[int, ...], ended: Round | None) -> None:
        if job.layout != self.job.layout:
            self.run.note_plan(describe_plan(job))
        if ended is None or (ended.nodes == nodes and job.layout == self.job.layout):
            return
        who = ", ".join(self.leader.name_of(number) for number in nodes)
        self.run.note_fault(
            kind="nodes",
            step=self.run.step(),
            action=f"continuing with {job.layout}",
            message=f"{len(nodes)} of {self.nodes.most} nodes joined: {who}",
        )

    # Faults.

    def _deaths(self) -> list[Death]:
        """Deaths on all nodes. Clocks may differ, so deaths by a signal that was not ours come first."""
        deaths = self.agent.crew.deaths()
        for node in self._round_nodes()[1:]:
            status = self.leader.last_of(node)
            if status is not None and status.round == self.rendezvous.round:
                deaths += status.deaths
        return sorted(deaths, key=lambda one: (one.by_us, (one.code or 0) >= 0, one.time))

    def _cause(self) -> Failure:
        """The root cause. A lost node takes its ranks with it, and what others saw of that is an echo."""
        nodes = self._round_nodes()
        for index, node in enumerate(nodes):
            if self._is_lost(node):
                here = self.job.layout.world // len(nodes)
                ranks = name_ranks(range(index * here, (index + 1) * here))
                name, silent = self.leader.name_of(node), self.leader.silent_for(node)
                message = f"node {name} ({ranks}) has not been heard from for {silent:.1f} s"
                return Failure(
                    index * here, message, False, time.time(), "is gone", NODE_LOST, more={"node": name}
                )
        return super()._cause()

    def _step_of(self, rank: int) -> int:
        """A remote rank's step is reported by its launcher, because recorders stay on their own machines."""
        nodes = self._round_nodes()
        index = rank // max(1, self.job.layout.world // max(1, len(nodes)))
        status = self.leader.last_of(nodes[index]) if 0 < index < len(nodes) else None
        return status.step if status is not None else super()._step_of(rank)

    def _my_logs(self) -> list[Path] | None:
        """All logs; with many nodes, other launchers redact their own."""
        here = self.job.layout.world // self.nodes.most
        return [self.run.log(rank) for rank in range(here)] if self.job.layout.world > ALWAYS else None

    def _round_nodes(self) -> tuple[int, ...]:
        return self.leader.call.round.nodes if self.leader.call.round else ()

    def _judge(self, ended: int) -> tuple[int, ...]:
        try:
            return super()._judge(ended)
        except GaveUp as over:
            self._say_farewell(End(message=str(over)))
            raise

    def _watch_over(self, limits: Limits) -> None:
        local = LocalRanks(self.run, range(self.spec.local_world_size), self.agent.processes)
        world = self.job.layout.world
        every = EveryRank(self.leader, self._round, local, limits.step * SUSPICIOUS, world)
        self.watchdog = Watchdog(every, remaining(limits, world)) if self.job.config.fault.stall else None

    # While workers run.

    def _look_around(self) -> None:
        super()._look_around()
        if self.leader.broken:
            raise RuntimeError(f"the nodes lost their store: {self.leader.broken}")
        if time.monotonic() - self._looked >= PLACE_SECONDS:
            self._looked = time.monotonic()
            if not self.place.stands(self.run.path):
                raise LeaderLost  # another launcher leads
        round, crew = self.leader.call.round, self.agent.crew
        if round is None or round.number != self.rendezvous.round or self._heard == self.leader.exchanges:
            return
        self._heard = (
            self.leader.exchanges
        )  # nothing changes between two exchanges, and there may be many nodes
        statuses = [self.leader.last_of(node) for node in round.nodes[1:]]
        failed = any(one is not None and one.round == round.number and one.failed for one in statuses)
        if crew.first_death is None and (failed or any(map(self._is_lost, round.nodes))):
            self.agent.kill(crew)
        if any(one.stop for one in self.leader.alive().values()):
            self.asked = self.asked or time.monotonic()
        self._make_room(round)

    def _make_room(self, round: Round) -> None:
        """Stop the workers after a step, with a commit, when a useful new node has arrived."""
        alive = self.leader.alive()
        candidates = frozenset({*round.nodes, *self._ready()})
        running = self.agent.crew.processes and self.agent.crew.first_death is None
        if not running or candidates in self._considered or self.leader.call.regroup == round.number:
            return
        self._considered.add(candidates)
        there = [node for node in [*round.nodes, *sorted(candidates - set(round.nodes))] if node in alive]
        try:
            larger = self._laid_out({node: alive[node] for node in there[: self.nodes.most]}).layout.world
        except BadInput:
            return
        if larger > self.job.layout.world:
            new = ", ".join(self.leader.name_of(node) for node in there if node not in round.nodes)
            self.progress.say(f"node {new} has joined: regrouping after this step")
            self.leader.command(regroup=round.number)
            attempt_store(self.rendezvous.store, round.number).set(REGROUP, "1")

    def _goes_on(self) -> bool:
        outcomes = [] if self.result is None else list(self.result.return_values.values())
        stopped = bool(outcomes) and all(one is not None and one.stopped for one in outcomes)
        self._regrouped = stopped and not self.asked and self.leader.call.regroup == self.rendezvous.round
        return self._regrouped

    # Ending.

    def _verdict(self) -> Report:
        if isinstance(self.error, BadInput):
            self._say_farewell(End(message=str(self.error.problems[0].what), code=BAD_INPUT))
            raise self.error
        return super()._verdict()

    def _say_farewell(self, end: End) -> None:
        """Tell the others that it is over; otherwise they would consider the leader lost, and one would take its
        place.
        """
        if self.leader.call.end is not None:
            return
        self.leader.command(end=end)
        mine = self.leader.number
        self.leader.wait(
            lambda: all(one.heard_end for number, one in self.leader.alive().items() if number != mine),
            FAREWELL_SECONDS,
        )
