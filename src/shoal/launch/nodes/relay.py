"""Relay heartbeats of many launchers through a few: every 32nd launcher forwards its neighbours' to the leader, and the
leader's back.

Thousands of launchers talking to one store keep its only thread busy. So with many, a head has its own store; its
neighbours write their heartbeats there, and read the leader's. Only heartbeats go this way: documents, which rarely
change, are in the leader's store. A launcher that has not heard the leader through its head for some exchanges talks to
the leader directly again, so losing a head loses no one else.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore

from shoal.launch.rendezvous import open_store
from shoal.parallel.signed_store import SignedStore

# Launchers that share a head, and the number of launchers from which relaying is used.
GROUP = 32
MANY = 64
# A heartbeat received through a head is valid for this many exchanges.
FRESH = 3
CONNECT_SECONDS = 2.0
CALL, CALL_BEAT = "call", "call-beat"


def head_of(number: int) -> int:
    return number - number % GROUP


def passed_key(head: int) -> str:
    return f"beats-{head}"


def own_key(number: int) -> str:
    return f"beat-{number}"


class Relay:
    """A head's side: a store that its neighbours use."""

    def __init__(self, address: str, secret: bytes, timeout: float, number: int) -> None:
        opened, _, port = open_store(address, timeout)
        self.store, self.number = SignedStore(opened.plain, secret, timeout), number
        self.place = f"{address}:{port}"
        self._call = ""

    def pass_on(self, beat: str, call: str) -> str:
        """Publish the leader's heartbeat and document version to the neighbours; returns theirs, for the leader."""
        if call != self._call:
            self.store.set(CALL, call)
            self._call = call
        self.store.set(CALL_BEAT, beat)
        found = {
            number: self.store.read(own_key(number)) for number in range(self.number + 1, self.number + GROUP)
        }
        return ",".join(f"{number} {text}" for number, text in found.items() if text is not None)


def read_passed(text: str) -> dict[int, tuple[int, int]]:
    """Number → its heartbeat, and its document version."""
    rows = (map(int, row.split()) for row in text.split(",") if row)
    return {number: (beat, valid) for number, beat, valid in rows}


class RelayLink:
    """A neighbour's side. A separate thread talks to the head, which may hang."""

    def __init__(self, place: str, secret: bytes, number: int) -> None:
        address, _, port = place.rpartition(":")
        self.address, self.port, self.secret, self.number = address, int(port), secret, number
        self.saying = ""
        self.heard: tuple[str, str] = ("", "")  # the leader's heartbeat and document version
        self.at = time.monotonic()  # when a new heartbeat was last received
        self.failed = False
        self.tick = 0.1
        self._beat = self._valid = -1
        self._store: SignedStore | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="shoal-relay", daemon=True).start()

    def fresh(self, tick: float) -> bool:
        self.tick = tick
        return not self.failed and bool(self.heard[0]) and time.monotonic() - self.at < FRESH * tick

    def _run(self) -> None:
        while not self.failed:
            try:
                self.turn()
            except Exception:  # torch has several exceptions, and all mean that the head is gone
                self.failed = True
            time.sleep(self.tick)

    def turn(self) -> None:
        """Send and receive, once."""
        store = self._store = self._store or self._connect()
        if self.saying:
            store.set(own_key(self.number), self.saying)
        text = store.read(CALL_BEAT)
        if text is None:
            return
        beat, valid, _ = text.split()
        if (
            int(beat) <= self._beat
        ):  # the head has nothing new, or another process has restored an older value
            return
        call = self.heard[1] if int(valid) == self._valid else store.read(CALL)
        if call is not None:
            self._beat, self._valid = int(beat), int(valid)
            self.heard, self.at = (text, call), time.monotonic()

    def _connect(self) -> SignedStore:
        with contextlib.closing(socket.create_connection((self.address, self.port), CONNECT_SECONDS)):
            pass  # torch would retry again and again
        wait = timedelta(seconds=CONNECT_SECONDS)
        return SignedStore(TCPStore(self.address, self.port, is_master=False, timeout=wait), self.secret)
