"""Where launchers connect without a shared directory: a host and port given to all of them."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from shoal.facts.problem import BadInput
from shoal.launch.adopt.launched_rank import LaunchedRank, parse_meet
from shoal.launch.interfaces import address_towards, interface_towards
from shoal.plan.resolve import Job

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from shoal.launch.nodes.meeting import MeetingPoint
    from shoal.parallel.signed_store import SignedStore

# The key of the leader's store with what followers need. Not signed: it contains the secret.
MEETING = "shoal-meeting"
FINDING = "shoal-find"
FIND_SECONDS = 2.0


@dataclass(frozen=True)
class Found:
    """What the leader publishes there."""

    place: MeetingPoint
    id: str  # of the run
    token: str  # left by it where the state is


@dataclass(frozen=True)
class Meet:
    """The place, and whether this node may be the one that leads there."""

    host: str
    port: int
    leads: bool
    surely: bool = False  # a scheduler has chosen it; otherwise the first launcher of this machine leads

    @staticmethod
    def of(
        asked: tuple[str, int] | None, found: LaunchedRank | None, environment: Mapping[str, str] = os.environ
    ) -> Meet | None:
        """From the user, a scheduler, or MASTER_ADDR, in this order; None: use a shared directory."""
        if found is not None:
            return Meet(found.host, found.port, found.rank == 0, True)
        if asked is None and {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            asked = parse_meet(f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}")
        if asked is None:
            return None
        host, port = asked
        try:
            address = socket.gethostbyname(host)
        except OSError as error:
            raise BadInput(
                f"--meet {host}:{port}: no host of that name ({error.strerror or error})", "its IPv4 address"
            ) from None
        return Meet(host, port, address_towards(host) == address)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def open(self, timeout: float) -> TCPStore | None:
        """The leader's store, at that place; None if another launcher of this machine was first."""
        from shoal.launch.rendezvous import PlaceTaken, serve_at

        try:
            return serve_at(self.host, self.port, timeout)
        except PlaceTaken:
            if self.surely:
                raise
            return None

    def announce(self, store: SignedStore, place: MeetingPoint, run_id: str, token: str) -> None:
        """For the leader: publish what followers need."""
        told = {"host": place.host, "secret": place.secret, "id": run_id, "token": token}
        if given_secret() is not None:
            del told["secret"]
        store.plain.set(MEETING, json.dumps(told))

    def find(self) -> Found | None:
        """What a leader publishes there; None if there is none yet.

        Runs in a thread, one at a time: a suspended machine accepts connections but never answers.
        """
        if any(thread.name == FINDING for thread in threading.enumerate()):
            return None
        found: list[Found | None] = []
        thread = threading.Thread(target=lambda: found.append(self._find()), name=FINDING, daemon=True)
        thread.start()
        thread.join(2 * FIND_SECONDS)
        return found[0] if found else None

    def _find(self) -> Found | None:
        from torch.distributed import TCPStore

        from shoal.launch.nodes.meeting import MeetingPoint

        try:
            # torch would retry for as long as it may.
            socket.create_connection((self.host, self.port), FIND_SECONDS).close()
            plain = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=FIND_SECONDS))
            told = json.loads(bytes(plain.compare_set(MEETING, "{}", "{}")))
            if not told:
                return None
            given = given_secret()
            secret = given.hex() if given is not None else told["secret"]
            bytes.fromhex(secret)
            return Found(
                MeetingPoint(self.host, self.port, str(told["host"]), secret),
                str(told["id"]),
                str(told["token"]),
            )
        except (OSError, RuntimeError, ValueError, KeyError, TypeError):
            return None


# Signs the values of the store. Set it on all nodes if others can reach the port; otherwise the leader draws one, and
# leaves it there for all to read.
SECRET, SHORTEST_SECRET = "SHOAL_MEETING_SECRET", 16


def given_secret(environment: Mapping[str, str] = os.environ) -> bytes | None:
    given = environment.get(SECRET)
    if given is not None and len(given) < SHORTEST_SECRET:
        raise BadInput(f"{SECRET} is too short", f"at least {SHORTEST_SECRET} letters, the same on all nodes")
    return None if given is None else given.encode()


def towards_others(job: Job, host: str, nodes: int) -> Job:
    """The job with the interface through which this node reaches the meeting place, if the config names none."""
    if job.config.cluster.interface is not None or nodes == 1:
        return job
    cluster = job.config.cluster.model_copy(update={"interface": interface_towards(host)})
    return replace(job, config=job.config.model_copy(update={"cluster": cluster}))
