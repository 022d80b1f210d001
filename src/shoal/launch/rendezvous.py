"""Where the workers of one machine meet: a store on loopback that outlives them, with fresh keys for every attempt.

torch's own rendezvous listens on every interface, and after a crash its next attempt finds the keys of the last one
and hangs more often than not on gloo. Here the store belongs to the launcher, is bound to loopback alone, and each
attempt writes under a prefix of its own.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from shoal.launch.interfaces import LOOPBACK

ROUND = "round"
STOP = "stop"
LAUNCHER = "launcher"


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one node. Launcher and workers share ``store`` for as long as the launcher lives."""

    def __init__(
        self,
        run_id: str,
        timeout: float,
        before_round: Callable[[int], None] | None = None,
        address: str = LOOPBACK,
    ) -> None:
        """``before_round`` is called before workers are started, and started again; it may refuse by raising.

        ``address``: where the store listens, and nowhere else.
        """
        self.address = address
        self._before_round = before_round
        self._run_id = run_id
        self._round = 0
        self._closed = False
        listener = socket.create_server((address, 0))
        self.port = listener.getsockname()[1]
        self.store = TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )

        self.store.set(LAUNCHER, secrets.token_hex(4))

    def next_rendezvous(self) -> RendezvousInfo:
        if self._before_round is not None:
            self._before_round(self._round)
        self._round += 1
        self.store.set(ROUND, str(self._round))
        return RendezvousInfo(
            PrefixStore(f"agent-{self._round}", self.store),
            0,
            1,
            RendezvousStoreInfo(self.address, self.port),
        )

    def get_backend(self) -> str:
        return "loopback"

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._closed = True
        return True

    def attempt(self) -> Store:
        """What the workers of the present attempt wrote."""
        return _attempt(self.store)


def _attempt(shared: Store) -> Store:
    return PrefixStore(f"workers-{shared.get(ROUND).decode()}", shared)


def attempt_name(shared: Store) -> str:
    """What no other attempt is called, be it this launcher's or another's."""
    return f"{shared.get(LAUNCHER).decode()}-{shared.get(ROUND).decode()}"


def connect(port: int, timeout: float, address: str = LOOPBACK) -> Store:
    """The launcher's store, from another process."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))


def join(port: int, timeout: float, address: str = LOOPBACK) -> tuple[Store, Store]:
    """A worker's way in: the launcher's store, and this attempt's own part of it."""
    shared = connect(port, timeout, address)
    return shared, _attempt(shared)
