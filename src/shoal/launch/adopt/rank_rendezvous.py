"""The rendezvous of adopted ranks: before training, check that every rank is present exactly once, and agree on the
round.

Their launcher may restart them, all or some, as often as it likes, and the store may outlive them (torchrun's does) or
not. So every process registers under a new name; the first rank waits for a new process of every rank and publishes who
takes part in the round. What a round writes has its own prefix.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from shoal.facts.problem import BadInput
from shoal.facts.traffic import name_ranks
from shoal.launch.adopt.launched_rank import LaunchedRank
from shoal.launch.nodes.meet import given_secret
from shoal.launch.rendezvous import serve_at
from shoal.parallel.signed_store import SECRET_BYTES, SignedStore, new_secret
from shoal.train.guard.processes import is_gone, process_space, started

# Set if torchrun's agent keeps the store that ranks connect to.
AGENT = "TORCHELASTIC_USE_AGENT_STORE"
# How long ranks wait for each other.
COME_SECONDS = 600.0
# Seconds between two heartbeats, and how long to wait for one.
BEAT_SECONDS, QUIET_SECONDS = 2.0, 6.0
LOOK_SECONDS = 0.05
# How long others may take to learn that there is nothing to do.
PART_SECONDS = 5.0
# Seconds after which the user is told which ranks are missing.
SAY_SECONDS = 5.0


class Rival(BadInput):
    """Another live process already is this rank. This process must not take part, and must say so."""


@dataclass(frozen=True)
class Present:
    """A process's registration as a rank."""

    name: str  # unique to this process
    host: str
    process: int
    space: str  # PID namespace of its process id
    started: str  # start time as the system counts it: process ids are reused


class RankRendezvous:
    """One rank's side of the rendezvous."""

    def __init__(self, told: LaunchedRank, timeout: float, come: float = COME_SECONDS) -> None:
        """``come``: how long to wait for the first rank."""
        self.told, self.timeout, self.come = told, timeout, come
        self.hosts = told.rank == 0 and os.environ.get(AGENT) != "True"
        self._plain = serve_at(told.host, told.port, timeout) if self.hosts else self._connect()
        self.secret = _secret(dist.PrefixStore("shoal", self._plain))
        self.store = SignedStore(dist.PrefixStore("shoal", self._plain), self.secret, timeout)
        self.number = 0
        self.me = Present(
            secrets.token_hex(8), socket.gethostname(), os.getpid(), process_space(), started(os.getpid())
        )

    def again(self) -> SignedStore:
        """The same store through another connection, for a separate thread: calls on one connection block each
        other.
        """
        return SignedStore(dist.PrefixStore("shoal", self._connect()), self.secret, self.timeout)

    def of_round(self, store: SignedStore) -> SignedStore:
        return store.within(f"round-{self.number}")

    def part(self) -> None:
        """Leave without training: the store goes away with the first rank, so it waits until the others have read
        it.
        """
        if not self.number:
            return
        store = self.of_round(self.store)
        with contextlib.suppress(RuntimeError):
            if not self.hosts:
                store.set(f"left-{self.told.rank}", "")
            else:
                others = [f"left-{rank}" for rank in range(1, self.told.world)]
                store.wait_for(others, timedelta(seconds=PART_SECONDS))

    def _connect(self) -> dist.TCPStore:
        told = self.told
        try:
            found = dist.TCPStore(told.host, told.port, is_master=False, timeout=timedelta(seconds=self.come))
        except RuntimeError:  # torch's error
            raise BadInput(
                f"no process answers at {told.host}:{told.port}, where {told.world} ranks are to meet",
                "start the first rank there, and see that no firewall is between; or --meet HOST:PORT",
            ) from None
        found.set_timeout(timedelta(seconds=self.timeout))
        return found

    # Joining.

    def refuse_rival(self) -> None:
        """Refuse a second process for the same rank: both would train, and write to the same files."""
        found = self.store.read(f"rank-{self.told.rank}")
        if found is not None and self._lives(Present(**json.loads(found))):
            other = Present(**json.loads(found))
            raise Rival(
                f"rank {self.told.rank} is taken: process {other.process} on {other.host} is alive. Two launchers "
                "compete for the same ranks",
                "stop one of them; or give it another place to meet: --meet HOST:PORT, or MASTER_PORT",
            )

    def _lives(self, other: Present) -> bool:
        if (other.host, other.space) == (self.me.host, self.me.space):
            return not is_gone(other.process) and started(other.process) == other.started
        key = f"beat-{self.told.rank}"
        before, deadline = self.store.read(key), time.monotonic() + QUIET_SECONDS
        while time.monotonic() < deadline:
            if self.store.read(key) != before:
                return True
            time.sleep(LOOK_SECONDS)
        return False

    def answer(self, say: Callable[[str], None]) -> SignedStore:
        """Register, and wait for all others; returns this round's part of the store."""
        self.store.set(f"rank-{self.told.rank}", json.dumps(asdict(self.me)))
        if self.told.rank == 0:
            self._call(say)
        else:
            self._wait_to_be_called()
        return self.of_round(self.store)

    def _call(self, say: Callable[[str], None]) -> None:
        last = json.loads(self.store.read("round") or '{"number": 0, "names": []}')
        self.number = int(last["number"]) + 1
        # Ranks of the last round that still wait for a peer learn that it is over.
        self.store.set("called", str(self.number))
        before = [*last["names"], *[""] * self.told.world]
        names = {0: self.me.name}
        began, told = time.monotonic(), False
        while len(names) < self.told.world:
            for rank in set(range(self.told.world)) - names.keys():
                found = self.store.read(f"rank-{rank}")
                name = json.loads(found)["name"] if found is not None else ""
                if name and name != before[rank]:
                    names[rank] = name
            if len(names) == self.told.world:
                break
            waited = time.monotonic() - began
            missing = name_ranks(sorted(set(range(self.told.world)) - names.keys()))
            if waited > COME_SECONDS:
                raise RuntimeError(f"{missing} of {self.told.world} did not come within {COME_SECONDS:.0f} s")
            if waited > SAY_SECONDS and not told:
                told = True
                say(f"waiting for {missing} of {self.told.world}")
            self.store.look_after()
            time.sleep(LOOK_SECONDS)
        called = [names[rank] for rank in range(self.told.world)]
        self.store.set("round", json.dumps({"number": self.number, "names": called}))

    def _wait_to_be_called(self) -> None:
        deadline = time.monotonic() + COME_SECONDS
        while time.monotonic() < deadline:
            found = json.loads(self.store.read("round") or "{}")
            if found and found["names"][self.told.rank :][:1] == [self.me.name]:
                self.number = int(found["number"])
                return
            self.store.look_after()
            time.sleep(LOOK_SECONDS)
        raise RuntimeError(f"rank 0 of {self.told.world} did not come within {COME_SECONDS:.0f} s")


def _secret(plain: dist.Store) -> bytes:
    """The secret all ranks sign with: the user's own, or one that the first rank to arrive left in the store,
    readable by all.
    """
    if (given := given_secret()) is not None:
        return given
    found = bytes(plain.compare_set("secret", "", new_secret().hex()))
    try:
        secret = bytes.fromhex(found.decode())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise BadInput(
            "the store where ranks are to meet is not one of Shoal's", "another place: --meet HOST:PORT"
        )
    return secret
