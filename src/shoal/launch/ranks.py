"""Run a function in several local processes, each a rank of a small world: for proofs, and for ``shoal.launch``.

``shoal train`` uses torchrun's agent to watch and restart its workers; here the first failure ends them all.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch.distributed as dist

from shoal.launch import rendezvous
from shoal.launch.errors import is_echo
from shoal.launch.redacted import redact_output
from shoal.train.files import OWNER_ONLY

# How long to wait, after a first failure, for one that may have caused it.
GRACE_SECONDS = 0.5


class RankFailed(RuntimeError):
    """A rank raised, died, or did not respond in time."""

    def __init__(self, rank: int, text: str, echo: bool = False) -> None:
        """``echo``: probably the effect of another rank's failure."""
        self.rank, self.text, self.echo = rank, text, echo
        super().__init__(f"rank {rank}: {text.rstrip().splitlines()[-1]}")


def run_ranks(
    world: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...] = (),
    seconds: float = 600.0,
    start: Literal["forkserver", "fork"] = "forkserver",
) -> list[Any]:
    """Run ``function(rank, world, store, *arguments)`` in ``world`` processes; returns results in rank order.

    ``function`` is imported by name in the processes, so it must be at the top level of its module. They are forked
    from the server that ``launch.local.warm_workers`` started, and connect to a store on loopback. ``start``: "fork"
    copies this process, in which every function exists.
    """
    context: Any = multiprocessing.get_context(start)
    if start == "fork":
        gc.collect()  # see _work
    meeting = rendezvous.LoopbackRendezvous("ranks", seconds)
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    for number in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_work,
            args=(number, world, meeting.port, meeting.store.secret, seconds, theirs, function, arguments),
            daemon=True,
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes[ours] = number
    try:
        return _results(pipes, seconds)
    finally:
        for one in processes:
            one.kill()
            one.join()


def _results(waiting: dict[Connection, int], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[RankFailed] = []
    deadline = time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            fine, answer, echo = _receive(pipe)
            if fine:
                results[rank] = answer
            else:
                failures.append(RankFailed(rank, answer, echo))
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        raise min(failures, key=lambda failure: failure.echo)
    if waiting:
        raise RankFailed(min(waiting.values()), f"no answer within {seconds:.0f} s")
    return [results[number] for number in sorted(results)]


def _receive(pipe: Connection) -> tuple[bool, Any, bool]:
    try:
        # From a process that we forked, through a private pipe.
        answer: tuple[bool, Any, bool] = pickle.loads(pipe.recv_bytes())  # noqa: S301
        return answer
    except EOFError:
        return False, "the process died", True


def _work(
    rank: int,
    world: int,
    port: int,
    secret: bytes,
    seconds: float,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    # A fork inherits its parent's garbage too. Collecting it may wait for threads that do not exist here, as a store
    # does for its server's: so never collect it.
    gc.freeze()
    os.umask(OWNER_ONLY)
    redact_output()
    try:
        store = rendezvous.connect(port, secret, seconds)
        answer = (True, function(rank, world, store, *arguments), False)
    except BaseException as error:
        answer = (False, traceback.format_exc(), is_echo(error))
    # Plain bytes: torch's own pickling shares memory with a process that is about to end.
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    if dist.is_initialized() and answer[0]:
        dist.destroy_process_group()
