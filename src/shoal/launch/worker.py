"""A rank's process: reads torchrun's environment, joins its peers, trains, and reports how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from shoal.launch import rendezvous
from shoal.launch.assignment import Assignment
from shoal.launch.environment import keep_only_passed
from shoal.launch.errors import describe
from shoal.launch.failure import FATAL, tell
from shoal.launch.init_rank import init_rank
from shoal.launch.nodes.count import of_all_nodes
from shoal.launch.redacted import redact_output
from shoal.launch.signals import STOP_SIGNALS
from shoal.observe import nccl
from shoal.observe.flight_recorder import START, FlightRecorder
from shoal.observe.record import recording
from shoal.parallel.signed_store import SignedStore
from shoal.plan.resolve import Job
from shoal.train.files import OWNER_ONLY
from shoal.train.guard.agreement import agree
from shoal.train.guard.corruption import Corrupted
from shoal.train.guard.stacks import stacks_on_signal
from shoal.train.loop import TrainingObserver, train
from shoal.train.outcome import TRUSTED, Outcome
from shoal.train.run_directory import RunDirectory

# The least time ranks wait for each other to start, whatever the collective timeout: starting is all processor time,
# scarce on a busy machine, and the launcher notices a rank that dies meanwhile.
START_SECONDS = 120.0
# How long a new attempt waits for the previous one's writer to end.
WRITER_SECONDS = 20.0
# How long a failing rank waits for the store to have its reason: the network to the store may be what failed.
TELL_SECONDS = 10.0


def work(
    assignment: Assignment, guest: TrainingObserver | None = None, main: Callable[..., Outcome] = train
) -> Outcome | None:
    """The process of one rank, from first to last line. None: an earlier attempt's error is final.

    ``main``: what the rank does once it has joined the others.
    """
    end_with_launcher()
    own_session()
    os.umask(OWNER_ONLY)
    left_out = keep_only_passed(assignment.job.config)
    rank = int(os.environ["RANK"])
    run = RunDirectory(assignment.run, assignment.node)
    run.keep_in(assignment.job.config.checkpoint.to)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout, to_connect = assignment.job.config.fault.timeout, _to_start(assignment.job)
    store = rendezvous.connect(port, assignment.secret, timeout, address, to_connect)
    attempt = rendezvous.attempt_store(store, assignment.round)
    if store.has(FATAL):
        return None
    try:
        print_to(run.log(rank))
        if left_out:
            print(f"not passed on to ranks (see run.environment): {' '.join(left_out)}", flush=True)
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        # One rank checks for all: the answer travels with the step's first all-reduce.
        asked = partial(_asked, store, attempt) if rank == 0 else bool
        local_rank, first = int(os.environ["LOCAL_RANK"]), partial(_agree, assignment, rank, attempt)
        return take_part(assignment, run, rank, local_rank, attempt, asked, restarts, first, guest, main)
    except Exception as error:
        # Report first: with a full disk there may be no log to print to, and the launcher may be gone as well.
        telling = threading.Thread(target=_tell, args=(store, attempt, rank, error), daemon=True)
        telling.start()
        telling.join(TELL_SECONDS)
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)  # skips the interpreter's report: the log has it, the terminal needs one line


def take_part(
    assignment: Assignment,
    run: RunDirectory,
    rank: int,
    local_rank: int,
    attempt: SignedStore | None,
    asked: Callable[[], bool],
    restarts: int,
    first: Callable[[], None] = lambda: None,
    guest: TrainingObserver | None = None,
    main: Callable[..., Outcome] = train,
) -> Outcome:
    """Join the other ranks, once ``first`` has returned, and train to the end."""
    with (
        _only_writer(run, rank),
        FlightRecorder(run.flight(rank)) as flight,
        stacks_on_signal(run.stack_dump(rank)),
    ):
        announce = flight.enter if guest is None else partial(_announce, flight, guest)
        announce(START, 0)
        watched = bool(assignment.job.config.fault.stall)
        if watched:
            # Read when the first group is created; no effect on gloo.
            os.environ.update({**nccl.settings(run.flights), **os.environ})
        first()
        mesh = init_rank(assignment.job, rank, local_rank, attempt, assignment.nodes, assignment.bound)
        with recording(flight, mesh.names) if watched else contextlib.nullcontext():
            outcome = main(
                assignment.job,
                run,
                assignment.dataset,
                mesh,
                asked,
                announce,
                assignment.attempt,
                restarts,
                guest,
                assignment.set_aside,
            )
        # Leave together: a rank that leaves early could no longer restore its store keys that others wait for.
        mesh.hosts.sum_integers([0])
        mesh.close()
        return outcome


def _tell(store: SignedStore, attempt: SignedStore, rank: int, error: Exception) -> None:
    with contextlib.suppress(Exception):
        if isinstance(error, Corrupted):
            attempt.set(TRUSTED, str(error.trusted))
        tell(store, attempt, rank, describe(rank, error))


def _asked(store: SignedStore, attempt: SignedStore) -> bool:
    """Whether to stop for good, or just long enough to make room for another node."""
    return store.has(rendezvous.STOP) or attempt.has(rendezvous.REGROUP)


def _announce(
    flight: FlightRecorder, guest: TrainingObserver, phase: str, step: int, part: int = 0, parts: int = 0, /
) -> None:
    flight.enter(phase, step, part, parts)
    if part == 0:
        guest.enter(phase, step)


def _agree(assignment: Assignment, rank: int, attempt: SignedStore) -> None:
    """Compare configs first: ranks with different ones would wait for each other forever, or train something else."""
    job = assignment.job
    told = {
        "layout": str(job.layout),
        "config": json.dumps(of_all_nodes(job.config)),
        "model": job.model.model_dump_json(),
        "torch": torch.__version__,
    }
    # The world as started: the layouts may be what differs.
    world = int(os.environ["WORLD_SIZE"])
    agree(attempt, rank, world, told, timedelta(seconds=_to_start(job)))


def _to_start(job: Job) -> float:
    return max(START_SECONDS, job.config.fault.timeout)


def end_with_launcher() -> None:
    """End when the launcher dies: a killed launcher cannot stop its workers, but its death closes a pipe that they
    hold.

    Checking its process id would not do: until its exit code is read, a dead process still has one.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=watch, name="shoal-launcher-watch", daemon=True).start()


def own_session() -> None:
    """Detach from the launcher's terminal and process group. Workers are forked with signals blocked."""
    with contextlib.suppress(OSError):
        os.setsid()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def print_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    redact_output(stamped=True)


@contextlib.contextmanager
def _only_writer(run: RunDirectory, rank: int) -> Iterator[None]:
    """The writing rank waits until the last attempt's writer is gone, which may outlive its launcher by a moment."""
    if rank != 0:
        yield
        return
    with (run.path / ".writer").open("w") as file:
        deadline = time.monotonic() + WRITER_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"another process still writes to {run.path}") from None
                time.sleep(0.1)
        yield
