"""Train on several machines: each runs the same command; the one that locks the run directory leads.

If the leader is lost, its lock is free, and another launcher leads.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from types import FrameType
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from rich.console import Console

from shoal import __version__
from shoal.facts.problem import BadInput
from shoal.launch import local
from shoal.launch.manifest import describe_plan, describe_run
from shoal.launch.nodes.count import NodeCount, of_all_nodes
from shoal.launch.nodes.meet import Meet, towards_others
from shoal.launch.report import STOPPED, Report
from shoal.launch.shared_place import check_state_is_shared, leave_token, shares_directory
from shoal.launch.signals import STOP_SIGNALS, stoppable
from shoal.plan.resolve import Job
from shoal.train.data.collection import Collection
from shoal.train.files import private_files
from shoal.train.run_directory import RunDirectory, identity

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from shoal.launch.nodes.meeting import MeetingPoint
    from shoal.launch.nodes.messages import Status
    from shoal.launch.supervisor import Supervisor

LEADING = "shoal.launch.nodes.leader:LeaderSupervisor"
FOLLOWING = "shoal.launch.nodes.follower:FollowerSupervisor"
# How long a leader waits for more nodes than it needs: at the start, and after taking over.
FIRST_SECONDS, NEXT_SECONDS = 10.0, 2.0
# Seconds between two attempts to lead, or to find the leader.
LOOK_SECONDS = 0.2
# How long to look for a leader at the agreed place, and after how long to tell the user.
FIND_SECONDS, SAY_SECONDS = 600.0, 5.0


def train(
    job: Job,
    run: RunDirectory,
    nodes: NodeCount,
    fresh: bool,
    console: Console,
    visible: str | None = None,
    entrypoint: str = local.WORKER,
    meet: Meet | None = None,
) -> Report:
    """Like ``local.train``, together with other nodes that run the same command. ``run.node`` is this node's name.

    ``meet``: where they connect; None: through a file in the run directory, which all of them share.
    """
    check_even(job, nodes)
    if meet is not None:
        job = towards_others(job, meet.host, nodes.most)
    local.check(job, run, visible, nodes.most)
    dataset = local.tokenised(job, console)
    job = local.with_length(job, dataset)
    if run.path.exists() and not fresh:
        run.check_continues(job, dataset.fingerprint)
    local.warm_workers([*local.PRELOAD, entrypoint.partition(":")[0]], job.config)
    # torch would print a page for each lost connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    together = _Together(job, run, nodes, console, visible, entrypoint, dataset, meet)
    with stoppable(together.on_signal, STOP_SIGNALS):
        while not together.asked:
            with ExitStack() as held:
                report = together.take_part(fresh, held)
            if report is not None:
                return report
            fresh = False
            time.sleep(LOOK_SECONDS)
    return Report(STOPPED, run.path, run.step(), "stopped while looking for the leader", None, None)


def check_even(job: Job, nodes: NodeCount) -> None:
    if job.config.server.servers:
        raise BadInput(
            f"server.servers = {job.config.server.servers} with --nodes: a parameter server and its workers are on one",
            "--nodes 1, or server.servers = 0",
        )
    if job.config.tune.search and job.config.layout == "auto":
        raise BadInput(
            "tune.search = true with --nodes: layouts are tried on one machine",
            "--set tune.search=false, or a layout by name",
        )
    if job.layout.world % nodes.most:
        raise BadInput(
            f"layout {job.layout} has {job.layout.world} ranks, which are not as many on each of {nodes.most} nodes",
            "another layout, or another number: --nodes",
        )


class _Together:
    """What does not depend on which launcher leads."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        nodes: NodeCount,
        console: Console,
        visible: str | None,
        entrypoint: str,
        dataset: Collection,
        meet: Meet | None = None,
    ) -> None:
        self.job, self.run, self.nodes, self.console = job, run, nodes, console
        self.entrypoint, self.dataset = entrypoint, dataset
        self.count = partial(local.devices_here, job, visible)
        self.asked: list[int] = []  # stop signals received while no attempt runs
        self.attempt: Supervisor | None = None
        self.followed = False  # another launcher led before
        self.told: MeetingPoint | None = None  # that leader, as last reported
        self.meet, self.token = meet, secrets.token_hex(16)
        self._looked_since = 0.0  # when the search for a leader began
        self.told_to_wait = False

    def take_part(self, fresh: bool, held: ExitStack) -> Report | None:
        """Lead, or follow the launcher that does, until that ends."""
        if self.meet is None:
            leads = held.enter_context(self.run.held_by_us())
            return self.lead(fresh, held) if leads else self.follow()
        local.load_attempt(LEADING)  # imports torch, whose store this uses
        if self.meet.leads and (opened := self.meet.open(self.job.config.fault.timeout)) is not None:
            new = not self.run.path.exists()
            held.enter_context(self.run.held())
            try:
                return self.lead(fresh, held, opened)
            except BadInput:
                if new:
                    shutil.rmtree(self.run.path, ignore_errors=True)
                raise
        return self.follow_there(self.meet, held)

    def lead(self, fresh: bool, held: ExitStack, opened: TCPStore | None = None) -> Report | None:
        """Lead until the run ends; None if this node no longer leads, or was asked to stop before it did."""
        start = local.prepare(self.job, self.run, fresh, self.console, self.dataset, held)
        if isinstance(start, Report):
            return start
        leading = local.load_attempt(LEADING)
        with local.begun(self.job, self.run, self.console, start):
            more = NEXT_SECONDS if self.followed else FIRST_SECONDS
            if self.meet is not None:
                leave_token(self.run, self.token)
            met = None if self.meet is None or opened is None else (self.meet, opened, self.token)
            return self._run(lambda: leading(self.nodes, more, met, self._status(), *self._rest()))

    def _run(self, new: Callable[[], Supervisor]) -> Report | None:
        from shoal.launch.nodes.meeting import LeaderLost

        try:
            if not self.asked:
                self.attempt = new()
                # Signals that arrived before this line are passed on; from now on the attempt handles its own.
                for number in self.asked:
                    self.attempt.on_signal(number)
                return self.attempt.run_to_end()
        except LeaderLost:
            # Keep a stop request that the attempt received.
            if self.attempt is not None and self.attempt.asked:
                self.asked.append(STOP_SIGNALS[0])
            self.console.print(
                f"the node that led {self.run.path} is lost"
                + ("" if self.asked else ": looking for another"),
                markup=False,
            )
        finally:
            self.attempt = None
        return None

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Handle signals while no attempt does; one may be about to start, or just over."""
        self.asked.append(number)
        if self.attempt is not None:
            self.attempt.on_signal(number)

    def follow(self) -> Report | None:
        """Follow until the run ends; None if there is no leader, or no longer."""
        following = local.load_attempt(FOLLOWING)
        from shoal.launch.nodes.meeting import MeetingPoint

        place = MeetingPoint.read(self.run.path)
        if place is None or (place == self.told and place.connect() is None):
            return None
        if place != self.told:
            self.told = place
            self.console.print(f"{self.run.path} is led from {place.host}", markup=False)
        if place.elsewhere:
            raise BadInput(
                f"{self.run.path} is led from {place.host}, which can be reached from itself alone",
                "on all nodes name the interface that joins them: --set cluster.interface=eth0",
            )
        return self._follow(following, place)

    def follow_there(self, meet: Meet, held: ExitStack) -> Report | None:
        """Like ``follow``, without a shared directory: this node may have its own, like the leader's."""
        following = local.load_attempt(FOLLOWING)
        found = meet.find()
        now = time.monotonic()
        if found is None or (found.place == self.told and found.place.connect() is None):
            self._looked_since = self._looked_since or now
            if now - self._looked_since > FIND_SECONDS:
                none = f"no node leads at {meet}; run the same command to continue"
                return Report(STOPPED, self.run.path, self.run.step(), none, None, None)
            if not self.told_to_wait and now - self._looked_since > SAY_SECONDS:
                self.told_to_wait = True
                self.console.print(f"waiting for the node that leads at {meet}", markup=False)
            return None
        self._looked_since, place = 0.0, found.place
        if place != self.told:
            self.told = place
            self.console.print(f"{self.run.path} is led from {place.host} at {meet}", markup=False)
        trouble = ""
        if not shares_directory(self.run, found.token):
            try:
                check_state_is_shared(self.run, found.token, self.run.node, place.host)
                held.enter_context(self.run.held())
                self._begin_alike(found.id)
            except BadInput as error:
                trouble = "; ".join(one.what for one in error.problems)
        return self._follow(following, place, trouble)

    def _begin_alike(self, run_id: str) -> None:
        with private_files():
            start = {**describe_run(self.job, self.dataset.path), "id": run_id}
            start["identity"] = identity(self.job, self.dataset.fingerprint)
            self.run.write_start(self.job, start, describe_plan(self.job))

    def _follow(self, following: Any, place: MeetingPoint, trouble: str = "") -> Report | None:
        self.followed = True
        if not trouble:
            self.run.adopt_memory()
        return self._run(lambda: following(place, self._status(trouble), *self._rest()))

    def _status(self, trouble: str = "") -> Status:
        from shoal.launch.nodes.messages import Status

        return Status(
            name=self.run.node,
            host=socket.gethostname(),
            process=os.getpid(),
            devices=self.room(),
            facts=self._facts(),
            trouble=trouble,
        )

    def _facts(self) -> dict[str, str]:
        """What has to agree on all nodes. Config sections are given as digests, because this is sent often."""
        config = of_all_nodes(self.job.config)
        texts = {section: json.dumps(values, sort_keys=True) for section, values in config.items()}
        return {
            **{section: blake3(text.encode()).hexdigest()[:16] for section, text in texts.items()},
            "what the data is": self.dataset.fingerprint,
            "the model": blake3(self.job.model.model_dump_json().encode()).hexdigest()[:16],
            "the version of torch": metadata.version("torch"),
            "the version of Shoal": __version__,
            "the name of the run directory": self.run.path.resolve().name,
        }

    def room(self) -> int:
        """How many ranks fit here: on CPUs any number, so there it is this node's share of those requested."""
        here = self.count()
        return self.job.layout.world // self.nodes.most if here is None else here

    def _rest(self) -> tuple[Any, ...]:
        return self.job, self.run, self.dataset.path, self.console, self.entrypoint, self.room
