"""How launchers meet: the leader's store, found through a file in the run directory, and a thread that talks to it.

Only that thread uses the connection. Other threads leave messages with it, and read what it heard last
and when. So no caller hangs where a network has been cut.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch.distributed import TCPStore

from shoal.launch.interfaces import LOOPBACK
from shoal.launch.nodes.messages import Announcement, Status
from shoal.parallel.signed_store import SignedStore
from shoal.train.files import private_files, replace_text

TICK_SECONDS = 0.1
CONNECT_SECONDS = 2.0

CONNECTING = "shoal-connect"

# Keys of the leader's store: that it is the leader's, its document, and those of all launchers, by their numbers.
HELLO, CALL = "hello", "call"
# How often launchers may join while one leader leads.
MOST_NUMBERS = 1 << 16
# How many keys with foreign values the leader skips at most.
MOST_STRANGE = 64


def node_key(number: int) -> str:
    return f"node-{number}"


def silence(timeout: float) -> float:
    """Seconds after which a launcher that is not heard from is taken for lost."""
    return min(max(timeout / 2, 2.0), 10.0)


class LeaderLost(Exception):
    """The leader, or the way to it."""


@dataclass(frozen=True)
class MeetingPoint:
    """Where the leader is: as the run's directory says, which only its owner can read."""

    address: str
    port: int
    host: str
    secret: str = field(repr=False)  # signs what is in the store

    def write(self, run: Path) -> None:
        with private_files():
            replace_text(run / ".meeting", json.dumps(self.__dict__) + "\n")

    @staticmethod
    def read(run: Path) -> MeetingPoint | None:
        try:
            place = MeetingPoint(**json.loads((run / ".meeting").read_text(encoding="utf-8")))
            bytes.fromhex(place.secret)
            return place
        except (OSError, ValueError, TypeError):
            return None

    def stands(self, run: Path) -> bool:
        """Whether no other launcher has written there. A lock on a network file system can be lost to another."""
        written = MeetingPoint.read(run)
        return written is None or written == self

    def remove(self, run: Path) -> None:
        if self.stands(run):
            with contextlib.suppress(OSError):
                (run / ".meeting").unlink()

    @property
    def elsewhere(self) -> bool:
        """Whether it can be reached from its own host alone, and that is not this one."""
        return self.address == LOOPBACK and self.host != socket.gethostname()

    def connect(self) -> SignedStore | None:
        """The leader's store; None where there is none, or where another process has taken its port since.

        From a thread, one at a time: where a process is stopped, its machine accepts connections, and no answer comes.
        """
        if any(thread.name == CONNECTING for thread in threading.enumerate()):
            return None
        found: list[SignedStore | None] = []
        thread = threading.Thread(target=lambda: found.append(self._connect()), name=CONNECTING, daemon=True)
        thread.start()
        thread.join(2 * CONNECT_SECONDS)
        return found[0] if found else None

    def _connect(self) -> SignedStore | None:
        try:
            # torch would try again and again, for as long as it may.
            socket.create_connection((self.address, self.port), CONNECT_SECONDS).close()
            wait = timedelta(seconds=CONNECT_SECONDS)
            plain = TCPStore(self.address, self.port, is_master=False, timeout=wait)
            store = SignedStore(plain, bytes.fromhex(self.secret))
            return store if store.has(HELLO) else None
        except (OSError, RuntimeError):
            return None


def new_meeting_point(address: str, port: int, store: SignedStore) -> MeetingPoint:
    store.set(HELLO, "")
    return MeetingPoint(address, port, socket.gethostname(), store.secret.hex())


class MeetingThread(ABC):
    """One launcher's side of the meeting. Subclasses say what is exchanged at every tick."""

    def __init__(self, store: SignedStore, status: Status, timeout: float) -> None:
        self.store, self.status, self.patience = store, status, silence(timeout)
        self.number = _join(store, status)
        self.call = Announcement()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._over = False
        self._talked = time.monotonic()  # when the store last answered
        self.broken = ""  # why nothing will be heard any more; empty as long as something may
        self._thread = threading.Thread(target=self._run, name="shoal-meeting", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Say the last word, and no more."""
        self._over = True
        self._wake.set()
        self._thread.join(CONNECT_SECONDS)

    def say(self, **changes: Any) -> None:
        """Change what is said of this node, and say it soon."""
        with self._changed:
            self.status = self.status.model_copy(update=changes)
        self._wake.set()

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until something holds, which may change with whatever is heard; False where the time is over."""
        with self._changed:
            return self._changed.wait_for(until, seconds)

    def _run(self) -> None:
        last = False
        while not last:
            last = self._over
            try:
                self._exchange()
                self._talked = time.monotonic()
            except Exception as error:  # torch has several, and all mean the same
                self.broken = self.broken or f"{type(error).__name__}: {error}"
                last = True
            with self._changed:
                self._changed.notify_all()
            if not last:
                self._wake.wait(TICK_SECONDS)
                self._wake.clear()

    @abstractmethod
    def _exchange(self) -> None:
        """Say and hear, at every tick."""

    def _tell_status(self) -> None:
        with self._changed:
            self.status = self.status.model_copy(update={"beat": self.status.beat + 1})
            told = self.status.model_dump_json()
        self.store.set(node_key(self.number), told)


def _join(store: SignedStore, status: Status) -> int:
    """The first number that no launcher of this run has. A counter could be set to anything by any process."""
    told = status.model_dump_json()
    for number in range(1, MOST_NUMBERS + 1):
        if store.claim(node_key(number), told):
            return number
    raise RuntimeError(f"{MOST_NUMBERS} launchers have joined")


class Follower(MeetingThread):
    """Says what its node does, and hears what the leader wants."""

    def __init__(self, store: SignedStore, status: Status, timeout: float) -> None:
        super().__init__(store, status, timeout)
        self._called = time.monotonic()  # when the leader's document was last there

    @property
    def lost(self) -> bool:
        """Whether the leader is; once and for all, for others have gone on without this node."""
        if not self.broken and time.monotonic() - min(self._talked, self._called) > self.patience:
            self.broken = f"no answer for {self.patience:.0f} s"
        return bool(self.broken)

    def _exchange(self) -> None:
        self._tell_status()
        text = self.store.read(CALL)
        call = None if text is None else Announcement.model_validate_json(text)
        if call is not None and call.beat >= self.call.beat:  # another process has put an older one back
            self._called = time.monotonic()
            with self._changed:
                self.call = call


@dataclass
class Heard:
    """What was last heard of a node, and when that last changed."""

    status: Status
    at: float


class Leader(MeetingThread):
    """Hears all nodes, and says what is to be done. Its own node is one of them, the first."""

    def __init__(self, store: SignedStore, status: Status, timeout: float) -> None:
        super().__init__(store, status, timeout)
        self._heard: dict[int, Heard] = {}
        store.set(CALL, self.call.model_dump_json())

    def command(self, **changes: Any) -> None:
        with self._changed:
            self.call = self.call.model_copy(update=changes)
        self._wake.set()

    def alive(self) -> Mapping[int, Status]:
        """The nodes that are heard from, this one first."""
        now = time.monotonic()
        with self._changed:
            others = {
                number: one.status
                for number, one in sorted(self._heard.items())
                if now - one.at < self.patience and number not in self.call.refused
            }
            return {self.number: self.status, **others}

    def heard(self) -> list[Status]:
        """What every other node said last, also those that were refused."""
        return [one.status for one in self._heard.values()]

    def silent_for(self, number: int) -> float:
        heard = self._heard.get(number)
        return time.monotonic() - heard.at if heard else float("inf")

    def name_of(self, number: int) -> str:
        status = self.last_of(number)
        return status.name if status else f"number {number}"

    def last_of(self, number: int) -> Status | None:
        """What a node said last, be it long ago."""
        if number == self.number:
            return self.status
        heard = self._heard.get(number)
        return heard.status if heard else None

    def _exchange(self) -> None:
        self._tell_status()
        for number, text in self._documents():
            try:
                told = Status.model_validate_json(text)
            except ValidationError:
                self._refuse(
                    number, "it speaks otherwise than the node that leads: not the same version of Shoal"
                )
                continue
            before = self._heard.get(number)
            if before is None or before.status.beat < told.beat:
                with self._changed:
                    self._heard[number] = Heard(told, time.monotonic())
        self._refuse_namesakes()
        self._refuse_others()
        with self._changed:
            self.call = self.call.model_copy(update={"beat": self.call.beat + 1})
            told_all = self.call.model_dump_json()
        self.store.set(CALL, told_all)

    def _documents(self) -> Iterator[tuple[int, str]]:
        """Those of the others: as many as have joined, however many foreign values there are."""
        strange = 0
        for number in range(1, MOST_NUMBERS + 1):
            text = self.store.read(node_key(number))
            if text is not None and number != self.number:
                yield number, text
            elif text is None:
                strange += 1
                if strange > MOST_STRANGE or not self.store.strange(node_key(number)):
                    return

    def _refuse_namesakes(self) -> None:
        """Of two launchers that live and are called the same, the later: they would share one memory.

        One that has lost us, and has found us again, comes with a new number; it is the same process.
        """
        first: dict[str, tuple[int, Status]] = {}
        for number, status in sorted(self.alive().items()):
            other, known = first.setdefault(status.name, (number, status))
            lives = other == self.number or self.silent_for(other) < 4 * TICK_SECONDS
            if lives and (known.host, known.process) != (status.host, status.process):
                self._refuse(
                    number,
                    f"another live launcher is called {status.name!r}: give each node a name, --node NAME",
                )

    def _refuse_others(self) -> None:
        """Whose ranks would train something else."""
        for number, status in self.alive().items():
            if status.trouble:
                self._refuse(number, status.trouble)
                continue
            names = sorted(self.status.facts.keys() | status.facts.keys())
            differ = [name for name in names if self.status.facts.get(name) != status.facts.get(name)]
            if differ:
                leader = f"node {self.status.name}, which leads"
                self._refuse(number, f"node {status.name} differs from {leader}, in {', '.join(differ)}")

    def _refuse(self, number: int, why: str) -> None:
        if number not in self.call.refused:
            with self._changed:
                self.call = self.call.model_copy(update={"refused": {**self.call.refused, number: why}})
