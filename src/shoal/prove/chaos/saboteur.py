"""The saboteur in a rank's process: waits for its point of a step, then injects the fault.

Training knows nothing of it. It observes what a rank announces, as the flight recorder does, and hooks into the points
between.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shoal.launch.assignment import Assignment
from shoal.launch.worker import work
from shoal.observe.flight_recorder import FIRST_STEP, STEP
from shoal.parallel.shards import gradient
from shoal.prove.chaos.damage import damage
from shoal.prove.chaos.fault_kinds import BACKWARD, BY_NAME, FORWARD, RENAME, UPDATE, WRITE
from shoal.prove.chaos.orders import FaultOrder, Orders
from shoal.train.checkpoint.storage import DirectoryStorage
from shoal.train.loop import Training
from shoal.train.outcome import Outcome
from shoal.train.run_directory import RunDirectory

# How long a disk stays full once it has refused a write, and how far a clock jumps.
FULL_SECONDS = 0.6
JUMP_SECONDS = 86_400.0


def sabotaged(assignment: Assignment) -> Outcome | None:
    """What a rank's process calls in a campaign, in place of ``work``."""
    return work(assignment, Saboteur(RunDirectory(assignment.run, assignment.node), int(os.environ["RANK"])))


class Saboteur:
    """The observer in one rank."""

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self.run, self.rank = run, rank
        self.orders = Orders(run.path)
        self.began = time.time()
        self.step = 0
        self.training: Training | None = None
        self._lock = threading.Lock()
        self._full: tuple[int, int] | None = None  # while the disk is full: the previous file size limit

    def enter(self, phase: str, step: int) -> None:
        self.step = step
        self.at(STEP if phase == FIRST_STEP else phase)

    def meet(self, training: Training) -> None:
        self.training = training
        blocks = training.program.placed.segments[-1].network.model.layers
        next(iter(blocks.values())).register_forward_hook(lambda *_: self.at(FORWARD))
        for parameter in training.program.placed.gradients.computed_with()[:1]:
            parameter.register_post_accumulate_grad_hook(lambda _: self.at(BACKWARD))
        update = training.step.before_update

        def before_update() -> None:
            update()
            self.at(UPDATE)

        training.step.before_update = before_update
        settle = training.commits.before_commit

        def before_commit() -> None:
            with self._refusals():
                settle()

        training.commits.before_commit = before_commit
        for place in (training.commits.disk, training.commits.memory):
            if isinstance(place, DirectoryStorage):
                self._around(place, "write", WRITE)
                self._around(place, "commit", RENAME)

    def _around(self, place: DirectoryStorage, method: str, point: str) -> None:
        original: Callable[..., Any] = getattr(place, method)

        def wrapped(*arguments: Any) -> Any:
            self.at(point)
            with self._refusals():
                return original(*arguments)

        setattr(place, method, wrapped)

    def at(self, point: str) -> None:
        """Execute the orders for this point."""
        with self._lock:
            due = [order for order in self.orders.for_rank(self.rank, self.began) if order.point == point]
            for order in due:
                self.orders.strike(order, self.step, point, self.run.step())
        for order in due:
            self._do(order)

    def _do(self, order: FaultOrder) -> None:
        kind = BY_NAME[order.kind]
        if kind.target == "checkpoint":
            gone = damage(self.run, order.kind, random.Random(order.seed))
            self.orders.add(order, gone=gone or 0, spared=gone is None)
        elif order.kind == "disk full":
            self._fill_disk()
        elif order.kind in STRIKES:
            STRIKES[order.kind](order)
        else:
            assert self.training is not None
            _wrong(self.training, order)

    def _fill_disk(self) -> None:
        """The kernel refuses this process every byte beyond a file's first thousand, until a commit has failed."""
        self._full = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, self._full[1]))

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Free the disk shortly after a write was refused."""
        try:
            yield
        except OSError:
            if self._full is not None:
                room = threading.Timer(FULL_SECONDS, self.make_room)
                room.daemon = True
                room.start()
            raise

    def make_room(self) -> None:
        if self._full is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._full)
            self._full = None


def _close_connections() -> None:
    """Close all connections to other ranks; those to the launcher's store have their own fault."""
    store = int(os.environ["MASTER_PORT"])
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            ports = {connection.getpeername()[1], connection.getsockname()[1]}
            if connection.type == socket.SOCK_STREAM and store not in ports:
                connection.shutdown(socket.SHUT_RDWR)


def _jump(seconds: float) -> None:
    """All processes share the system clock; this changes only what this one reads."""
    original = time.time
    time.time = lambda: original() + seconds


def _use_all_memory() -> None:
    """Limit the address space to what is in use; then allocate what the next step would."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.empty(1 << 30, dtype=torch.uint8).zero_()


def _send_itself(order: FaultOrder) -> None:
    # A stopped process continues when it is told to; by then it should end.
    os.kill(os.getpid(), signal.Signals[order.kind])


# Faults of a whole process, whatever it trains.
STRIKES: dict[str, Callable[[FaultOrder], object]] = {
    **dict.fromkeys(("SIGKILL", "SIGTERM", "SIGABRT", "SIGSTOP"), _send_itself),
    "SIGSEGV": lambda order: ctypes.string_at(0),
    "hang": lambda order: time.sleep(3600),
    "hang with the lock": lambda order: ctypes.PyDLL(None).sleep(3600),
    "closed connections": lambda order: _close_connections(),
    "clock jump": lambda order: _jump(random.Random(order.seed).choice((-1, 1)) * JUMP_SECONDS),
    "out of memory": lambda order: _use_all_memory(),
}


def _wrong(training: Training, order: FaultOrder) -> None:
    """Compute wrong numbers, or none."""
    numbers = random.Random(order.seed)
    pieces = [piece for piece in training.step.pieces if piece.tensor.numel()]
    piece = numbers.choice(pieces)
    place = numbers.randrange(piece.tensor.numel())
    if order.kind == "bit flip in a weight":
        # States in a file are not in memory; the working copy is, unless it is in a file too.
        values = piece.tensor if piece.filed is None or piece.working is None else piece.working
        in_file = piece.held.home_file
        if in_file is not None:
            values = in_file.read()
        bits = values.detach().view(-1).view(torch.int32)
        bits[place] ^= 1 << numbers.randrange(31)
        if in_file is not None:
            in_file.send(values).result()
    elif order.kind == "NaN in a gradient":
        shared = training.step.placed.shared
        original = shared.sum

        def spoiled(every: Any) -> None:
            original(every)
            _put(shared, "sum", original)
            gradient(piece).view(-1)[place] = float("nan")
            if piece.squares is not None:  # it has left the device, which had measured it
                piece.squares.fill_(float("nan"))
            elif piece.away is not None and piece.away.times:  # or is in a file, and was measured on its way
                device = training.step.mesh.device
                piece.squares = torch.full((), float("nan"), dtype=torch.float64, device=device)

        _put(shared, "sum", spoiled)
    elif order.kind == "loader crash":

        def broken(*_: Any) -> Any:
            raise OSError(5, "the loader could not read its data")

        # What its thread prepares next fails.
        _put(training.loader, "_rows", broken)


def _put(owner: object, name: str, value: object) -> None:
    """Replace an attribute."""
    setattr(owner, name, value)
