"""Workers of a parameter server: one that is three times as slow, one that dies between two pushes, one that hangs."""

from __future__ import annotations

import os
import signal
import time
from unittest.mock import patch

from shoal.launch.assignment import Assignment
from shoal.launch.server import work_for_servers
from shoal.observe.flight_recorder import COMMIT, STEP
from shoal.parallel.server import PUSH, ServerLink

TIMES = 3


class Slowed:
    """Told when a gradient is begun and when it is there."""

    began = 0.0

    def __call__(self, phase: str, step: int) -> None:
        if phase == STEP:
            self.began = time.perf_counter()
        elif phase == COMMIT:
            time.sleep((TIMES - 1) * (time.perf_counter() - self.began))


def work(assignment: Assignment, number: int, incarnation: int, address: str, port: int) -> None:
    if number == assignment.job.layout.world - 1:
        work_for_servers(assignment, number, incarnation, address, port, Slowed())
    else:
        work_for_servers(assignment, number, incarnation, address, port)


def signalled_at_push(count: int, number: signal.Signals) -> None:
    """This process gets a signal when it is about to push for the so manieth time."""
    tell, told = ServerLink.tell, []

    def counted(self: ServerLink, kind: float, *others: float) -> None:
        told.extend([kind] if kind == PUSH else [])
        if len(told) == count:
            os.kill(os.getpid(), number)
        tell(self, kind, *others)

    patch.object(ServerLink, "tell", counted).start()  # for as long as this process lives


def dies_between_pushes(
    assignment: Assignment, number: int, incarnation: int, address: str, port: int
) -> None:
    """The last worker, at first: of two servers one has its fifth gradient and the other will not."""
    if number == assignment.job.layout.world - 1 and incarnation == 1:
        signalled_at_push(10, signal.SIGKILL)
    work_for_servers(assignment, number, incarnation, address, port)


def hangs_with_an_item(
    assignment: Assignment, number: int, incarnation: int, address: str, port: int
) -> None:
    """The last worker, at first: it holds an item that no other gets while it is waited for."""
    if number == assignment.job.layout.world - 1 and incarnation == 1:
        signalled_at_push(9, signal.SIGSTOP)
    work_for_servers(assignment, number, incarnation, address, port)
