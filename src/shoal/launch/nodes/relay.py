"""Beats of many launchers by way of a few: every 32nd passes on those of its neighbours to the leader, and back.

Thousands of launchers that all talk to one store keep its only thread busy. So of many, a head has a store of its own;
its neighbours tell it their beats, and hear the leader's from it. Only beats go this way: documents, which change
seldom, are in the leader's store. Who does not hear the leader by way of its head for some exchanges talks to the
leader again, so a head that is lost takes no other with it.
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

# Numbers that share a head, and how many launchers there have to be.
GROUP = 32
MANY = 64
# What was heard by way of a head counts for so many exchanges.
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
        """Tell the neighbours the leader's beat and document; return what they say, for the leader."""
        if call != self._call:
            self.store.set(CALL, call)
            self._call = call
        self.store.set(CALL_BEAT, beat)
        found = {
            number: self.store.read(own_key(number)) for number in range(self.number + 1, self.number + GROUP)
        }
        return ",".join(f"{number} {text}" for number, text in found.items() if text is not None)


def read_passed(text: str) -> dict[int, tuple[int, int]]:
    """Number → its beat, and that of its document."""
    rows = (map(int, row.split()) for row in text.split(",") if row)
    return {number: (beat, valid) for number, beat, valid in rows}


class RelayLink:
    """A neighbour's side. A thread of its own talks to the head, which may hang."""

    def __init__(self, place: str, secret: bytes, number: int) -> None:
        address, _, port = place.rpartition(":")
        self.address, self.port, self.secret, self.number = address, int(port), secret, number
        self.saying = ""
        self.heard: tuple[str, str] = ("", "")  # the leader's beat, and its document
        self.at = time.monotonic()  # when a new beat was last heard
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
            except Exception:  # torch has several, and all mean that the head is gone
                self.failed = True
            time.sleep(self.tick)

    def turn(self) -> None:
        """Say and hear, once."""
        store = self._store = self._store or self._connect()
        if self.saying:
            store.set(own_key(self.number), self.saying)
        text = store.read(CALL_BEAT)
        if text is None:
            return
        beat, valid, _ = text.split()
        if (
            int(beat) <= self._beat
        ):  # the head hears nothing new, or another process has put an older one back
            return
        call = self.heard[1] if int(valid) == self._valid else store.read(CALL)
        if call is not None:
            self._beat, self._valid = int(beat), int(valid)
            self.heard, self.at = (text, call), time.monotonic()

    def _connect(self) -> SignedStore:
        with contextlib.closing(socket.create_connection((self.address, self.port), CONNECT_SECONDS)):
            pass  # torch would try again and again
        wait = timedelta(seconds=CONNECT_SECONDS)
        return SignedStore(TCPStore(self.address, self.port, is_master=False, timeout=wait), self.secret)
