"""Where workers meet: a store of the launcher's that outlives them, with fresh keys for every attempt.

torch's own rendezvous listens on every interface, and after a crash its next attempt finds the keys of the last one
and hangs more often than not on gloo. Here the store belongs to a launcher, is bound to one address alone, and each
attempt writes under a prefix of its own.
"""

from __future__ import annotations

import secrets
import socket
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from shoal.launch.interfaces import LOOPBACK

# Keys. To stop, after a step and with a commit: the run, or one attempt at it, which another follows.
STOP, REGROUP = "stop", "regroup"
LAUNCHER = "launcher"


class Rendezvous(RendezvousHandler):
    """What torchrun's agent asks before it starts workers: who takes part, and where they meet.

    An attempt at the run is called by the number of its round.
    """

    def __init__(self, run_id: str, store: Store, address: str, port: int) -> None:
        self.store, self.address, self.port = store, address, port
        self.round = 0
        self._run_id = run_id
        self._closed = False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo: ...

    def attempt(self) -> Store:
        """What the workers of the present attempt wrote."""
        return attempt_store(self.store, self.round)

    def info(self, node: int, nodes: int) -> RendezvousInfo:
        own = PrefixStore(f"agent-{self.round}", self.store)
        return RendezvousInfo(own, node, nodes, RendezvousStoreInfo(self.address, self.port))

    def get_backend(self) -> str:
        return "shoal"

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


class LoopbackRendezvous(Rendezvous):
    """A rendezvous of one node. Launcher and workers share ``store`` for as long as the launcher lives."""

    def __init__(
        self,
        run_id: str,
        timeout: float,
        before_round: Callable[[int], None] = lambda number: None,
        address: str = LOOPBACK,
    ) -> None:
        """``before_round`` is called before the workers of a round are started; it may refuse by raising.

        ``address``: where the store listens, and nowhere else.
        """
        self._before_round = before_round
        super().__init__(run_id, *open_store(address, timeout))

    def next_rendezvous(self) -> RendezvousInfo:
        self._before_round(self.round + 1)
        self.round += 1
        return self.info(0, 1)


def open_store(address: str, timeout: float) -> tuple[TCPStore, str, int]:
    """A store of this process at a free port of an address, and of no other."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
    store.set(LAUNCHER, secrets.token_hex(4))
    return store, address, port


def connect(port: int, timeout: float, address: str = LOOPBACK) -> Store:
    """The launcher's store, from another process."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))


def attempt_store(shared: Store, number: int) -> Store:
    """The part of a launcher's store that belongs to the attempt of that number."""
    return PrefixStore(f"workers-{number}", shared)


def attempt_name(shared: Store, number: int) -> str:
    """What no other attempt is called, be it this launcher's or another's."""
    return f"{shared.get(LAUNCHER).decode()}-{number}"
