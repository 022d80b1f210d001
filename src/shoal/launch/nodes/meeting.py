"""Where launchers connect: the leader's store, found through a file in the run directory."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from shoal.launch.interfaces import LOOPBACK
from shoal.parallel.signed_store import SignedStore
from shoal.train.files import private_files, replace_text

CONNECT_SECONDS = 2.0
CONNECTING = "shoal-connect"

# A key that identifies the store as the leader's.
HELLO = "hello"


class LeaderLost(Exception):
    """The leader, or the connection to it, is lost."""


@dataclass(frozen=True)
class MeetingPoint:
    """Where the leader is, according to the run directory, which only its owner can read."""

    address: str
    port: int
    host: str
    secret: str = field(repr=False)  # signs values in the store

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
        """Whether no other launcher has written there. On a network file system a lock can be lost to another
        process.
        """
        written = MeetingPoint.read(run)
        return written is None or written == self

    def remove(self, run: Path) -> None:
        if self.stands(run):
            with contextlib.suppress(OSError):
                (run / ".meeting").unlink()

    @property
    def elsewhere(self) -> bool:
        """Whether it is reachable only from its own host, and that is not this one."""
        return self.address == LOOPBACK and self.host != socket.gethostname()

    def connect(self) -> SignedStore | None:
        """The leader's store; None if there is none, or another process has taken its port since.

        Runs in a thread, one at a time: if the leader's process is stopped, its machine accepts connections but never
        answers.
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
            # torch would retry for as long as it may.
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
