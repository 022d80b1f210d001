"""The rendezvous: the launcher's store, which outlives workers, with fresh keys for every attempt.

torch's own rendezvous listens on every interface, and after a crash its next attempt finds the last one's keys and
usually hangs on gloo. Here the store belongs to a launcher, is bound to a single address, and each attempt writes under
its own prefix.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from shoal.facts.problem import BadInput
from shoal.launch.interfaces import LOOPBACK, address_towards
from shoal.parallel.signed_store import SignedStore, new_secret

# Keys that request a stop after a step, with a commit: of the run, or of one attempt that another will follow.
STOP, REGROUP = "stop", "regroup"


class PlaceTaken(BadInput):
    """Another process listens at this address and port."""


class Rendezvous(RendezvousHandler):
    """What torchrun's agent asks before it starts workers: which nodes take part, and where they connect.

    An attempt at the run is named by the number of its round.
    """

    def __init__(
        self,
        run_id: str,
        store: SignedStore,
        address: str,
        port: int,
        gather: Callable[[int], tuple[int, int, int]],
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """``gather`` is called with the next round's number and returns the round that begins, this node's index, and
        the number of nodes.

        It runs before a round's workers are started, and ``look`` while they run; both may refuse by raising.
        """
        self.store, self.address, self.port = store, address, port
        self._gather, self._look = gather, look
        self.round = 0
        self._run_id = run_id
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        self.round, node, nodes = self._gather(self.round + 1)
        own = PrefixStore(f"agent-{self.round}", self.store.plain)
        return RendezvousInfo(own, node, nodes, RendezvousStoreInfo(self.address, self.port))

    def attempt(self) -> SignedStore:
        """The current attempt's part of the store."""
        return attempt_store(self.store, self.round)

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
        """Polled by the agent while all is well."""
        self._look()
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
        """``before_round`` is called before a round's workers are started; it may refuse by raising.

        ``address``: the only address the store listens on.
        """

        def alone(number: int) -> tuple[int, int, int]:
            before_round(number)
            return number, 0, 1

        super().__init__(run_id, *open_store(address, timeout), alone)


def allow_connections() -> None:
    """Raise the limit of open files: every rank and every launcher holds a connection to the leader's store."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems report more than they allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_store(address: str, timeout: float) -> tuple[SignedStore, str, int]:
    """A store of this process at a free port of one address, with a new secret."""
    store, port = serve_store(address, 0, timeout)
    return SignedStore(store, new_secret(), timeout), address, port


def serve_store(address: str, port: int, timeout: float) -> tuple[TCPStore, int]:
    """torch's own store at a port (0: a free one) of one address only."""
    listener = socket.create_server((address, port))
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
    return store, port


def serve_at(host: str, port: int, timeout: float) -> TCPStore:
    """A store where others were told to connect: at a name of this machine, or of one that forwards to it."""
    try:
        address = socket.gethostbyname(host)
        try:
            return serve_store(address, port, timeout)[0]
        except OSError as error:
            own = address_towards(host)
            if error.errno != errno.EADDRNOTAVAIL or own is None:
                raise
            # A service's address, as in Kubernetes.
            return serve_store(own, port, timeout)[0]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PlaceTaken(
                f"{host}:{port}, where this run is to meet, is in use by another process: perhaps a launcher of the "
                "same run",
                "stop that one; or another port: --meet HOST:PORT, or MASTER_PORT",
            ) from None
        raise BadInput(
            f"{host}:{port}, where this run is to meet, cannot be opened: {error.strerror or error}",
            "--meet HOST:PORT with a name or an address of the first node",
        ) from None


def connect(
    port: int, secret: bytes, timeout: float, address: str = LOOPBACK, to_connect: float | None = None
) -> SignedStore:
    """Another connection to the launcher's store. ``to_connect``: seconds for connecting, if different."""
    first = timedelta(seconds=timeout if to_connect is None else to_connect)
    plain = TCPStore(address, port, is_master=False, timeout=first)
    plain.set_timeout(timedelta(seconds=timeout))
    return SignedStore(plain, secret, timeout)


def attempt_store(shared: SignedStore, number: int) -> SignedStore:
    """The part of a launcher's store that belongs to attempt ``number``."""
    return shared.within(f"workers-{number}")
