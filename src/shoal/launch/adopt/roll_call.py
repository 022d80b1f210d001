"""The roll call of adopted ranks: before anything is computed all are there, each once, and agree what round it is.

Their launcher may start them again, all or some, as often as it likes, and the store outlives them (torchrun's)
or not. So a rank comes with a name that is new for every process; the first rank waits until all the others have come
that were not in the last round, and says who is in this one. What a round writes lies under a prefix of its own.
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
from shoal.launch.adopt.told import ToldRank
from shoal.launch.nodes.meet import given_secret
from shoal.launch.rendezvous import serve_at
from shoal.parallel.signed_store import SECRET_BYTES, SignedStore, new_secret
from shoal.train.guard.processes import is_gone, process_space, started

# Whose store it is that ranks meet in: torchrun's agent keeps one for them.
AGENT = "TORCHELASTIC_USE_AGENT_STORE"
# How long ranks wait for each other.
COME_SECONDS = 600.0
# Between two signs of life, and how long one is waited for.
BEAT_SECONDS, QUIET_SECONDS = 2.0, 6.0
LOOK_SECONDS = 0.05
# For how long others may take to hear that there is nothing to do.
PART_SECONDS = 5.0
# After which the user is told who is missing.
SAY_SECONDS = 5.0


class Rival(BadInput):
    """Another process is this rank already. This one must not take part in anything, nor keep silent."""


@dataclass(frozen=True)
class Present:
    """What a rank says when it is called."""

    name: str  # of this process, as none was ever called
    host: str
    process: int
    space: str  # in which its process id counts
    started: str  # when, as the system counts: numbers of processes are used again


class RollCall:
    """One rank's side of it."""

    def __init__(self, told: ToldRank, timeout: float, come: float = COME_SECONDS) -> None:
        """``come``: for how long the first rank is waited for."""
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
        """The same store by another connection, for a thread of its own: calls on one wait for each other."""
        return SignedStore(dist.PrefixStore("shoal", self._connect()), self.secret, self.timeout)

    def of_round(self, store: SignedStore) -> SignedStore:
        return store.within(f"round-{self.number}")

    def part(self) -> None:
        """Ranks that do not train leave: the store goes with the first, so it waits until the others have read it."""
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
        except RuntimeError:  # as torch says it
            raise BadInput(
                f"no process answers at {told.host}:{told.port}, where {told.world} ranks are to meet",
                "start the first rank there, and see that no firewall is between; or --meet HOST:PORT",
            ) from None
        found.set_timeout(timedelta(seconds=self.timeout))
        return found

    # Coming.

    def refuse_rival(self) -> None:
        """Two processes for one rank would both train, and write to the same files."""
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
        """Be there, and wait for all others; the part of the store that is this round's."""
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
    """What all ranks sign with: the user's own, or what the first to come has drawn and left there for all to read."""
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
