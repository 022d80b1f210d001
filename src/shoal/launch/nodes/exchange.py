"""The exchange between launchers: a thread in each reports what its node does, and receives what the leader wants.

Only that thread uses the connection. Other threads leave messages with it, and read what it received last and when. So
no caller hangs if a network connection breaks.

An exchange costs each launcher two or three messages, however many launchers there are: it writes a heartbeat (a few
bytes) and reads the leader's. Documents are written when they change, and read when a heartbeat says so. The leader
reads all heartbeats in one message; with more than a few dozen launchers most heartbeats come through others
(``relay.py``).
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.launch.interfaces import LOOPBACK
from shoal.launch.nodes.meeting import CONNECT_SECONDS
from shoal.launch.nodes.messages import Announcement, Status
from shoal.launch.nodes.relay import Relay, RelayLink, head_of, passed_key
from shoal.parallel.signed_store import SignedStore

# Seconds between two exchanges. With more nodes than the next constant, the number of messages per second stays the
# same and each node waits longer; but a live launcher is heard at least as often as the last constant says before it
# would count as lost.
TICK_SECONDS = 0.1
NODES_A_TICK = 512
TICKS_IN_PATIENCE = 12
# A document is written and read again after this many exchanges: another process may have restored an older one.
REPEAT = 16

# Keys of the leader's store: its document and its heartbeat; those of each launcher carry its number.
CALL, CALL_BEAT = "call", "call-beat"
# How many launchers may join while one leader leads.
MOST_NUMBERS = 1 << 16
# Launchers that arrive at the same moment choose among this many numbers.
CHOICE = 16


def node_key(number: int) -> str:
    return f"node-{number}"


def beat_key(number: int) -> str:
    return f"beat-{number}"


def tick_of(nodes: int, patience: float) -> float:
    """Seconds between two exchanges with this many nodes."""
    return min(
        max(TICK_SECONDS, TICK_SECONDS * nodes / NODES_A_TICK),
        max(TICK_SECONDS, patience / TICKS_IN_PATIENCE),
    )


def silence(timeout: float) -> float:
    """Seconds of silence after which a launcher counts as lost."""
    return min(max(timeout / 2, 2.0), 10.0)


class MeetingThread(ABC):
    """One launcher's side of the exchange. Subclasses define what each exchange does."""

    def __init__(self, store: SignedStore, status: Status, timeout: float) -> None:
        self.store, self.status, self.patience = store, status, silence(timeout)
        self.number = _join(store, status)
        self.call = Announcement()
        self.tick = TICK_SECONDS
        self.exchanges = 0  # number of exchanges so far
        self._news = True  # the status has changed since it was last written
        self._document = ToldDocument()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._over = False
        self._talked = time.monotonic()  # when the store last responded
        self.broken = ""  # why nothing more will be received; empty while something may
        self._thread = threading.Thread(target=self._run, name="shoal-meeting", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send the last status and stop."""
        self._over = True
        self._wake.set()
        self._thread.join(CONNECT_SECONDS)

    def say(self, **changes: Any) -> None:
        """Change this node's status, and send it soon."""
        with self._changed:
            before, self.status = self.status, self.status.model_copy(update=changes)
            if self.status == before:
                return
            self._news = True
        self._wake.set()

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until a condition holds, which is checked after every exchange; False on timeout."""
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
        """Do one exchange; False if another would be pointless."""
        try:
            self._exchange()
            self._talked = time.monotonic()
        except Exception as error:  # torch has several exceptions, and all mean the same
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
        """Send and receive, once per tick."""

    def _tell_status(self) -> None:
        self.store.set(beat_key(self.number), self._next_beat())

    def _next_beat(self) -> str:
        """The next heartbeat. It names the valid document version; a changed document is written first."""
        with self._changed:
            beat = self.status.beat + 1
            self.status = self.status.model_copy(update={"beat": beat})
            if self._news:
                self._document, self._news = ToldDocument(self.status.model_dump_json(), beat), False
        if self._document.due(beat):
            self.store.set(node_key(self.number), self._document.text)
        return f"{beat} {self._document.beat}"


@dataclass(frozen=True)
class ToldDocument:
    """A document as last written, and the heartbeat it was written with."""

    text: str = ""
    beat: int = 0

    def due(self, beat: int) -> bool:
        """Whether to write it: when it is new, and from time to time unchanged."""
        return (beat - self.beat) % REPEAT == 0


def _join(store: SignedStore, status: Status) -> int:
    """Take a number that no launcher of this run has: the first free one, or one near it if many arrive at once.

    A counter would not do: any process could set it to anything.
    """
    told = status.model_dump_json()
    ahead = 1
    while (number := _last_taken(store) + ahead) <= MOST_NUMBERS:
        if store.claim(node_key(number), told):
            return number
        ahead = 1 + secrets.randbelow(CHOICE)
    raise RuntimeError(f"{MOST_NUMBERS} launchers have joined")


def _last_taken(store: SignedStore) -> int:
    """A taken number whose successor is free, or 0; found without checking all of them."""
    step = 1
    while step <= MOST_NUMBERS and store.has(node_key(step)):
        step *= 2
    taken, free = step // 2, step
    while free - taken > 1:
        middle = (taken + free) // 2
        taken, free = (middle, free) if store.has(node_key(middle)) else (taken, middle)
    return taken


class Follower(MeetingThread):
    """Reports its node's status, and receives what the leader wants."""

    def __init__(self, store: SignedStore, status: Status, timeout: float, address: str = LOOPBACK) -> None:
        """``address``: where others can reach this node."""
        super().__init__(store, status, timeout)
        self.address, self.timeout = address, timeout
        self._called = time.monotonic()  # when the leader's document was last received
        self._heard = -1  # the heartbeat of that document
        self._heard_at = 0  # and the exchange
        self._call_text = ""
        self.relay: Relay | None = None
        self.link: RelayLink | None = None

    @property
    def lost(self) -> bool:
        """Whether the leader is lost; final, because others have continued without this node."""
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
        # Another process may have restored an older heartbeat, or removed the document.
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
            self._heard = min(self._heard, valid - 1)  # request it again
            return
        self._heard, self._heard_at, self._call_text = call.beat, self.exchanges, text
        with self._changed:
            self.call = call.model_copy(update={"beat": max(call.beat, self.call.beat)})

    def _usable_link(self) -> RelayLink | None:
        """The link to the relay head, as long as the leader is heard through it."""
        if self.link is not None and self.link.fresh(self.tick):
            return self.link
        if self.link is not None and time.monotonic() - self.link.at > self.patience:
            self.link.failed, self.link = True, None  # there may be another one by now
        return None

    def _pass_on(self, beat: str) -> None:
        """As a head, relay heartbeats for the neighbours; as a neighbour, look for the head."""
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
