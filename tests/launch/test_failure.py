"""Whose failure it was."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore, TCPStore

from shoal.facts.problem import BadInput
from shoal.launch.errors import describe
from shoal.launch.failure import CONNECTION, FATAL, STALL, Death, cause, tell
from shoal.launch.rendezvous import LOOPBACK, attempt_store, connect
from shoal.parallel.signed_store import SignedStore, new_secret
from shoal.train.checkpoint.manifest import Damaged

PEER_GONE = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
Stores = tuple[SignedStore, SignedStore]


def died(*codes: tuple[int, int], by_us: tuple[int, ...] = (), stopped: tuple[int, ...] = ()) -> list[Death]:
    """Ranks with their exit codes, the first one to die first."""
    return [
        Death(rank=rank, time=at, code=code, by_us=rank in by_us, stopped=rank in stopped)
        for at, (rank, code) in enumerate(codes)
    ]


@pytest.fixture
def stores() -> Stores:
    shared = SignedStore(HashStore(), new_secret())
    return shared, attempt_store(shared, 1)


def test_a_ranks_own_error_beats_earlier_echoes(stores: Stores) -> None:
    tell(*stores, 0, describe(0, PEER_GONE))
    tell(*stores, 1, describe(1, ValueError("the cause")))
    failure = cause(*stores, 2, died((0, 1), (1, 1)))
    assert str(failure) == "rank 1 failed: ValueError: the cause"
    assert not failure.final and not stores[0].has(FATAL)


def test_what_would_come_again_is_final(stores: Stores) -> None:
    tell(*stores, 1, describe(1, BadInput("no such file", "look for it")))
    assert stores[0].has(FATAL)
    assert cause(*stores, 2, died((0, -9))).final


def test_the_first_of_two_own_errors_is_shown(stores: Stores) -> None:
    tell(*stores, 1, describe(1, ValueError("first")))
    tell(*stores, 0, describe(0, ValueError("second")))
    assert cause(*stores, 2, died((0, 1), (1, 1))).message == "ValueError: first"


def test_a_silent_rank_was_killed(stores: Stores) -> None:
    """Whoever died first; without its exit code, the one that has told nothing."""
    tell(*stores, 0, describe(0, PEER_GONE))
    tell(*stores, 2, describe(2, PEER_GONE))
    assert str(cause(*stores, 3)) == "rank 1 failed: killed, or crashed without an error message"
    assert str(cause(*stores, 3, died((1, -9), (0, -15), (2, 1)))) == "rank 1 failed: killed by SIGKILL"
    assert str(cause(*stores, 3, died((0, 1), (2, 1), (1, -11)))) == "rank 1 failed: killed by SIGSEGV"
    assert not stores[0].has(FATAL)


def test_a_launcher_that_finds_several_dead_at_once_knows_whom_it_has_ended(stores: Stores) -> None:
    """On a busy machine it looks late: then the order is that of ranks, and says nothing."""
    tell(*stores, 0, describe(0, PEER_GONE))
    for number in (signal.SIGKILL, signal.SIGTERM):
        killed = cause(*stores, 3, died((0, 1), (1, -number), (2, -15), by_us=(2,)))
        assert str(killed) == f"rank 1 failed: killed by {number.name}"
    tell(*stores, 1, describe(1, ValueError("the cause")))
    ended = cause(*stores, 3, died((0, -15), (1, 1), (2, -9), by_us=(0, 2)))
    assert str(ended) == "rank 1 failed: ValueError: the cause"


def test_ranks_that_all_only_lost_each_other_lost_their_connection(stores: Stores) -> None:
    tell(*stores, 1, describe(1, PEER_GONE))
    tell(*stores, 0, describe(0, PEER_GONE))
    failure = cause(*stores, 2, died((1, 1), (0, 1)))
    assert failure.kind == CONNECTION
    assert str(failure).startswith("rank 1 failed: lost its connection to rank 0:")


def test_a_timeout_is_an_echo_and_not_a_reason_to_give_up() -> None:
    assert describe(0, DistStoreError("wait timeout after 1000ms")).echo
    assert not describe(0, RuntimeError("shapes do not match")).echo


def test_known_causes_are_told_in_words() -> None:
    full = describe(0, OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl"))
    assert full.message.startswith("the disk is full (runs/x/metrics.jsonl); the last commit is untouched")
    assert describe(0, Damaged("no sound checkpoint is left")).final


def test_a_death_that_we_caused_is_not_the_cause(stores: Stores) -> None:
    """Rank 2 is stopped; rank 0 gives up on it before the watchdog has spoken; torch's agent ends rank 1 for that.

    As it happened: rank 1, whose SIGTERM nobody had noted as ours, was named.
    """
    tell(*stores, 0, describe(0, PEER_GONE))
    ended = died((1, -15), (0, 1), (2, -9), (3, -9), by_us=(1, 2, 3), stopped=(2,))
    failure = cause(*stores, 4, ended)
    assert (failure.rank, failure.kind) == (2, STALL)
    assert str(failure).startswith("rank 2 stalled: stopped by a signal or a debugger; rank 0 lost its conn")
    # Nobody was stopped: what rank 0 saw is all there is. And where it said nothing, it was the first.
    unstopped = [death.model_copy(update={"stopped": False}) for death in ended]
    assert str(cause(*stores, 4, unstopped)).startswith(
        "rank 0 failed: lost its connection to one of ranks 1"
    )
    # A rank's own error, and a signal of somebody else, explain more than that another was found stopped.
    assert str(cause(*stores, 4, [*ended[:3], *died((3, -9))])) == "rank 3 failed: killed by SIGKILL"
    tell(*stores, 3, describe(3, ValueError("the cause")))
    assert str(cause(*stores, 4, ended)) == "rank 3 failed: ValueError: the cause"


def test_who_died_without_a_word_is_not_who_we_ended(stores: Stores) -> None:
    ended = died((0, -9), (1, 1), (2, -9), by_us=(0, 2))
    assert str(cause(*stores, 3, ended)) == "rank 1 failed: killed, or crashed without an error message"
    # With no other explanation at all, somebody has to be named.
    assert cause(*stores, 2, died((1, -9), (0, -9), by_us=(0, 1))).rank == 0


def test_a_reason_is_with_the_launcher_before_the_rank_ends() -> None:
    """A network that is cut holds back what ranks say, and then their ends are seen before their reasons.

    As it happened: ranks that had lost each other were "killed, or crashed without an error message".
    """
    held, secret = threading.Event(), new_secret()
    plain = TCPStore(LOOPBACK, 0, is_master=True, timeout=timedelta(seconds=20))
    attempt = attempt_store(SignedStore(plain, secret), 1)
    with socket.create_server((LOOPBACK, 0)) as network:
        threading.Thread(target=_forward, args=(network, plain.port, held), daemon=True).start()
        store = connect(network.getsockname()[1], secret, 20)
        held.set()
        telling = threading.Thread(
            target=tell, args=(store, attempt_store(store, 1), 0, describe(0, PEER_GONE))
        )
        telling.start()
        telling.join(0.3)
        assert telling.is_alive() and not attempt.has("failure-0")
        held.clear()
        telling.join()
        assert cause(store, attempt, 1, died((0, 1))).kind == CONNECTION


def _forward(network: socket.socket, port: int, held: threading.Event) -> None:
    """One connection to a port, of which nothing passes while it is held."""
    with network.accept()[0] as client, socket.create_connection((LOOPBACK, port)) as server:

        def pump(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    while held.is_set():
                        time.sleep(0.01)
                    target.sendall(data)

        threading.Thread(target=pump, args=(server, client), daemon=True).start()
        pump(client, server)
