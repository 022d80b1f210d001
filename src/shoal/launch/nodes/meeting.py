"""Where launchers meet: the leader's store, found through a file in the run directory."""

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

# A key of the leader's store: that it is the leader's.
HELLO = "hello"


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
