"""The exchange between launchers: a thread of each that says what its node does, and hears what the leader wants.

Only that thread uses the connection. Other threads leave messages with it, and read what it heard last
and when. So no caller hangs where a network has been cut.

An exchange costs each launcher two or three messages, however many there are: it says that it lives (a beat: a few
bytes) and hears the leader's beat. Documents are written when they change, and read when a beat says that they have.
The leader reads all beats in one message; of more than a few dozen launchers most beats come by way of others
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

# Between two exchanges. With more nodes than these there are as many messages in a second, and each waits longer for
# its turn; but a launcher that lives is heard at least so many times before it would be taken for lost.
TICK_SECONDS = 0.1
NODES_A_TICK = 512
TICKS_IN_PATIENCE = 12
# After so many exchanges a document is written and read again: another process may have put an older one back.
REPEAT = 16

# Keys of the leader's store: its document and its beat; each launcher's have its number.
CALL, CALL_BEAT = "call", "call-beat"
# How often launchers may join while one leader leads.
MOST_NUMBERS = 1 << 16
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


class MeetingThread(ABC):
    """One launcher's side of the meeting. Subclasses say what is exchanged at every tick."""

    def __init__(self, store: SignedStore, status: Status, timeout: float) -> None:
        self.store, self.status, self.patience = store, status, silence(timeout)
        self.number = _join(store, status)
        self.call = Announcement()
        self.tick = TICK_SECONDS
        self.exchanges = 0  # so far
        self._news = True  # the status is not the one that was told last
        self._document = ToldDocument()
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
                self._document, self._news = ToldDocument(self.status.model_dump_json(), beat), False
        if self._document.due(beat):
            self.store.set(node_key(self.number), self._document.text)
        return f"{beat} {self._document.beat}"


@dataclass(frozen=True)
class ToldDocument:
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
