"""A worker of a parameter server that takes three times as long as it needs: the last one."""

from __future__ import annotations

import time

from shoal.launch.assignment import Assignment
from shoal.launch.server import work_for_servers
from shoal.observe.flight_recorder import COMMIT, STEP

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
