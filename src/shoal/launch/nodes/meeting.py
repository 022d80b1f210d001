"""How launchers meet: the leader's store, found through a file in the run directory, and a thread that talks to it.

Only that thread uses the connection. Other threads leave messages with it, and read what it heard last
and when. So no caller hangs where a network has been cut.

An exchange costs each launcher two or three messages, however many there are: it says that it lives (a beat: a few
bytes) and hears the leader's beat. Documents are written when they change, and read when a beat says that they have.
The leader reads all beats in one message; of more than a few dozen launchers most beats come by way of others
(``relay.py``).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch.distributed import TCPStore

from shoal.launch.interfaces import LOOPBACK
from shoal.launch.nodes.messages import Announcement, Status
from shoal.launch.nodes.relay import FRESH, MANY, Relay, RelayLink, head_of, passed_key, read_passed
from shoal.parallel.signed_store import SignedStore
from shoal.train.files import private_files, replace_text

# Between two exchanges. With more nodes than these there are as many messages in a second, and each waits longer for
# its turn; but a launcher that lives is heard at least so many times before it would be taken for lost.
TICK_SECONDS = 0.1
NODES_A_TICK = 512
TICKS_IN_PATIENCE = 12
# After so many exchanges a document is written and read again: another process may have put an older one back.
REPEAT = 16
# Of many launchers the leader looks for more after so many exchanges.
LOOK_FOR_MORE = 8
CONNECT_SECONDS = 2.0

CONNECTING = "shoal-connect"

# Keys of the leader's store: that it is the leader's, its document and its beat; each launcher's have its number.
HELLO, CALL, CALL_BEAT = "hello", "call", "call-beat"
# How often launchers may join while one leader leads.
MOST_NUMBERS = 1 << 16
# How many numbers in a row the leader skips at most: free ones, and those with foreign values.
MOST_STRANGE = 64
# Launchers that come at the same moment choose among so many numbers.
CHOICE = 16


def node_key(number: int) -> str:
    return f"node-{number}"


def beat_key(number: int) -> str:
    return f"beat-{number}"


def tick_of(nodes: int, patience: float) -> float:
    """Seconds between two exchanges of so many."""
    return min(
        max(TICK_SECONDS, TICK_SECONDS * nodes / NODES_A_TICK),
        max(TICK_SECONDS, patience / TICKS_IN_PATIENCE),
    )


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
        self.tick = TICK_SECONDS
        self.exchanges = 0  # so far
        self._news = True  # the status is not the one that was told last
        self._document = _Document()
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
            before, self.status = self.status, self.status.model_copy(update=changes)
            if self.status == before:
                return
            self._news = True
        self._wake.set()

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until something holds, which may change with whatever is heard; False where the time is over."""
        with self._changed:
            return self._changed.wait_for(until, seconds)

    def _run(self) -> None:
        last = False
        while not last:
            last = self._over
            last = not self.turn() or last
            if not last:
                self._wake.wait(self.tick)
                self._wake.clear()

    def turn(self) -> bool:
        """One exchange; false where there is no use in another."""
        try:
            self._exchange()
            self._talked = time.monotonic()
        except Exception as error:  # torch has several, and all mean the same
            self.broken = self.broken or f"{type(error).__name__}: {error}"
            failed = True
        else:
            failed = False
        with self._changed:
            self.exchanges += 1
            self._changed.notify_all()
        return not failed

    @abstractmethod
    def _exchange(self) -> None:
        """Say and hear, at every tick."""

    def _tell_status(self) -> None:
        self.store.set(beat_key(self.number), self._next_beat())

    def _next_beat(self) -> str:
        """It says which document is valid; where that has changed, it is told first."""
        with self._changed:
            beat = self.status.beat + 1
            self.status = self.status.model_copy(update={"beat": beat})
            if self._news:
                self._document, self._news = _Document(self.status.model_dump_json(), beat), False
        if self._document.due(beat):
            self.store.set(node_key(self.number), self._document.text)
        return f"{beat} {self._document.beat}"


@dataclass(frozen=True)
class _Document:
    """As it was told last, and with which beat."""

    text: str = ""
    beat: int = 0

    def due(self, beat: int) -> bool:
        """When it is new; and from time to time, unchanged."""
        return (beat - self.beat) % REPEAT == 0


def _join(store: SignedStore, status: Status) -> int:
    """A number that no launcher of this run has: the first that is free, or near it where many come at once.

    A counter could be set to anything by any process.
    """
    told = status.model_dump_json()
    ahead = 1
    while (number := _last_taken(store) + ahead) <= MOST_NUMBERS:
        if store.claim(node_key(number), told):
            return number
        ahead = 1 + secrets.randbelow(CHOICE)
    raise RuntimeError(f"{MOST_NUMBERS} launchers have joined")


def _last_taken(store: SignedStore) -> int:
    """A number that is taken, or 0, and the next one is free: found without a look at all of them."""
    step = 1
    while step <= MOST_NUMBERS and store.has(node_key(step)):
        step *= 2
    taken, free = step // 2, step
    while free - taken > 1:
        middle = (taken + free) // 2
        taken, free = (middle, free) if store.has(node_key(middle)) else (taken, middle)
    return taken


class Follower(MeetingThread):
    """Says what its node does, and hears what the leader wants."""

    def __init__(self, store: SignedStore, status: Status, timeout: float, address: str = LOOPBACK) -> None:
        """``address``: of this node, where others can reach it."""
        super().__init__(store, status, timeout)
        self.address, self.timeout = address, timeout
        self._called = time.monotonic()  # when the leader's document was last there
        self._heard = -1  # the beat of that document
        self._heard_at = 0  # and the exchange
        self._call_text = ""
        self.relay: Relay | None = None
        self.link: RelayLink | None = None

    @property
    def lost(self) -> bool:
        """Whether the leader is; once and for all, for others have gone on without this node."""
        if not self.broken and time.monotonic() - min(self._talked, self._called) > self.patience:
            self.broken = f"no answer for {self.patience:.0f} s"
        return bool(self.broken)

    def _exchange(self) -> None:
        said, link = self._next_beat(), self._usable_link()
        document: str | None = None
        if link is not None:
            link.saying = said
            text, document = link.heard
        else:
            self.store.set(beat_key(self.number), said)
            text = self.store.read(CALL_BEAT) or ""
        if not text:
            return
        beat, valid, tick = text.split()
        if int(valid) > self._heard or self.exchanges - self._heard_at >= REPEAT:
            self._hear(int(valid), document)
        # Another process may have put an older beat back, or have taken the document away.
        if self._heard >= int(valid) and int(beat) >= self.call.beat:
            self._called, self.tick = time.monotonic(), float(tick)
            with self._changed:
                self.call = self.call.model_copy(update={"beat": int(beat)})
            if self.call.relays:
                self._pass_on(text)

    def _hear(self, valid: int, document: str | None) -> None:
        text = self.store.read(CALL) if document is None else document
        call = None if text is None else Announcement.model_validate_json(text)
        if text is None or call is None or call.beat < max(valid, self._heard):
            self._heard = min(self._heard, valid - 1)  # asked for again
            return
        self._heard, self._heard_at, self._call_text = call.beat, self.exchanges, text
        with self._changed:
            self.call = call.model_copy(update={"beat": max(call.beat, self.call.beat)})

    def _usable_link(self) -> RelayLink | None:
        """To the head, as long as the leader is heard by way of it."""
        if self.link is not None and self.link.fresh(self.tick):
            return self.link
        if self.link is not None and time.monotonic() - self.link.at > self.patience:
            self.link.failed, self.link = True, None  # perhaps there is another one by now
        return None

    def _pass_on(self, beat: str) -> None:
        """As a head, to the neighbours and from them; as a neighbour, look for the head."""
        head = head_of(self.number)
        if head == self.number:
            self.relay = self.relay or Relay(self.address, self.store.secret, self.timeout, head)
            self.store.set(passed_key(head), self.relay.pass_on(beat, self._call_text))
            self.say(relay=self.relay.place)
        elif head and self.link is None and self.exchanges % REPEAT == self.number % REPEAT:
            text = self.store.read(node_key(head))
            place = "" if text is None else Status.model_validate_json(text).relay
            if place:
                self.link = RelayLink(place, self.store.secret, self.number)
                self.link.start()


@dataclass
class Heard:
    """What was last heard of a node, and when that last changed."""

    status: Status
    at: float
    beat: int = 0
    relayed: float = 0.0  # when a beat last came by way of a head


class Leader(MeetingThread):
    """Hears all nodes, and says what is to be done. Its own node is one of them, the first."""

    def __init__(self, store: SignedStore, status: Status, timeout: float) -> None:
        super().__init__(store, status, timeout)
        self._heard: dict[int, Heard] = {}
        self._beating: list[int] = []  # whose beats are read at once
        self._joined = 0  # numbers up to this are all taken, by launchers that were heard or refused
        self._numbers: dict[str, list[int]] = {}  # of each name, in the order in which they came
        self._call_news, self._call = True, _Document()
        store.set(CALL, self.call.model_dump_json())
        store.set(CALL_BEAT, f"0 0 {self.tick}")

    def command(self, **changes: Any) -> None:
        with self._changed:
            self.call, self._call_news = self.call.model_copy(update=changes), True
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
        self._hear_beats()
        if not self.call.relays or self.exchanges % LOOK_FOR_MORE == 0:
            self._hear_others()
        self._refuse_namesakes()
        self.tick = tick_of(1 + len(self._heard), self.patience)
        if self.call.relays != (len(self._heard) >= MANY):
            self.command(relays=not self.call.relays)
        with self._changed:
            beat = self.call.beat + 1
            self.call = self.call.model_copy(update={"beat": beat})
            if self._call_news:
                self._call, self._call_news = _Document(self.call.model_dump_json(), beat), False
        if self._call.due(beat):
            self.store.set(CALL, self._call.text)
        self.store.set(CALL_BEAT, f"{beat} {self._call.beat} {self.tick:.3f}")

    def _hear_beats(self) -> None:
        """Of all whose beats are known to be there; and the documents of those who say that theirs has changed."""
        now, beats = time.monotonic(), dict[int, tuple[int, int]]()
        heads = [number for number in self._beating if self._heard[number].status.relay]
        for text in self.store.read_all([passed_key(head) for head in heads]):
            beats |= read_passed(text or "")
        for number, (beat, _) in beats.items():
            if number in self._heard and beat > self._heard[number].beat:
                self._heard[number].relayed = now
        told = [number for number in self._beating if now - self._heard[number].relayed > FRESH * self.tick]
        for number, text in zip(told, self.store.read_all([*map(beat_key, told)]), strict=True):
            beat, valid = map(int, (text or "0 0").split())
            if beat >= beats.get(number, (0, 0))[0]:
                beats[number] = beat, valid
        changed = []
        for number, (beat, valid) in beats.items():
            heard = self._heard.get(number)
            if heard is not None and beat > heard.beat:  # another process may have put an older one back
                heard.beat, heard.at = beat, now
            if heard is not None and valid > heard.status.beat:
                changed.append(number)
        for number, text in zip(changed, self.store.read_all(list(map(node_key, changed))), strict=True):
            self._take_document(number, text)

    def _hear_others(self) -> None:
        """Those who have come since, however many foreign values there are; and those whose beat is not there yet."""
        beating, number = set(self._beating), self._joined
        free = strange = 0  # in a row: who comes at the same moment as others may leave some out
        while number < MOST_NUMBERS and free <= CHOICE and strange <= MOST_STRANGE:
            number += 1
            if number in beating or number == self.number:
                free = strange = 0
                continue
            text, foreign = self.store.look(node_key(number))
            if text is None:
                free, strange = free + (not foreign), strange + foreign
                continue
            free = strange = 0
            self._take_document(number, text)
            if number in self._heard and self.store.has(beat_key(number)):
                self._beating.append(number)
        while self._joined + 1 == self.number or self._joined + 1 in beating:
            self._joined += 1

    def _take_document(self, number: int, text: str | None) -> None:
        if text is None:
            return
        try:
            told = Status.model_validate_json(text)
        except ValidationError:
            self._refuse(
                number, "it speaks otherwise than the node that leads: not the same version of Shoal"
            )
            return
        before = self._heard.get(number)
        if before is None or before.status.beat < told.beat:
            with self._changed:
                beat = max(told.beat, before.beat if before else 0)
                relayed = before.relayed if before else 0.0
                self._heard[number] = Heard(told, time.monotonic(), beat, relayed)
            if before is None:
                self._numbers.setdefault(told.name, []).append(number)
                self._refuse_other(number, told)

    def _refuse_namesakes(self) -> None:
        """Of two launchers that live and are called the same, the later: they would share one memory.

        One that has lost us, and has found us again, comes with a new number; it is the same process.
        """
        if not any(numbers[1:] or name == self.status.name for name, numbers in self._numbers.items()):
            return
        first: dict[str, tuple[int, Status]] = {}
        for number, status in sorted(self.alive().items()):
            other, known = first.setdefault(status.name, (number, status))
            lives = other == self.number or self.silent_for(other) < 4 * self.tick
            if lives and (known.host, known.process) != (status.host, status.process):
                self._refuse(
                    number,
                    f"another live launcher is called {status.name!r}: give each node a name, --node NAME",
                )

    def _refuse_other(self, number: int, status: Status) -> None:
        """One whose ranks would train something else."""
        if status.trouble:
            self._refuse(number, status.trouble)
            return
        names = sorted(self.status.facts.keys() | status.facts.keys())
        differ = [name for name in names if self.status.facts.get(name) != status.facts.get(name)]
        if differ:
            leader = f"node {self.status.name}, which leads"
            self._refuse(number, f"node {status.name} differs from {leader}, in {', '.join(differ)}")

    def _refuse(self, number: int, why: str) -> None:
        if number not in self.call.refused:
            with self._changed:
                refused = {**self.call.refused, number: why}
                self.call, self._call_news = self.call.model_copy(update={"refused": refused}), True
