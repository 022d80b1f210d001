"""torchrun's agent, which starts workers and starts them again, and a watch over the order in which they end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from shoal.train.guard.processes import is_stopped

# After a first death its peers have so long to say what they saw. Then they end too: one of them may be stopped, and
# torch would wait half a minute for it.
GRACE_SECONDS = 0.25


@dataclass
class Crew:
    """The processes of one attempt on this machine, by rank."""

    processes: dict[int, BaseProcess] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # who has ended, the first one first
    times: dict[int, float] = field(default_factory=dict)  # and when
    first_death: float | None = None
    ended_by_us: set[int] = field(default_factory=set)
    found_stopped: set[int] = field(default_factory=set)  # by a signal or a debugger, when we ended them

    def exit_codes(self) -> dict[int, int]:
        """Of those that have ended. To be asked when the agent is done with them: only one reader learns a code."""
        codes = {rank: self.processes[rank].exitcode for rank in self.order}
        return {rank: code for rank, code in codes.items() if code is not None}


class Agent(LocalElasticAgent):
    """Starts workers from a warm server. torch's own names the lowest rank that died; here it is the first that did."""

    def __init__(self, spec: WorkerSpec, ended_well: Callable[[int], bool]) -> None:
        """``ended_well``: whether a rank, whose process is over, had nothing left to do."""
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull), start_method="forkserver")
        self.ended_well = ended_well
        self.crew = Crew()
        self._started = threading.Event()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self.crew = Crew()
        started: dict[int, int] = super()._start_workers(worker_group)
        children = {process.pid: process for process in multiprocessing.active_children()}
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        found = {ranks[local]: children[pid] for local, pid in started.items() if pid in children}
        self.crew = Crew(found)
        self._started.set()
        return started

    def _exit_barrier(self) -> None:
        """Agents of several nodes would wait for each other; their launchers do, and know who is lost."""

    def processes(self) -> Mapping[int, int]:
        """The process ids of the present attempt's workers by rank; none while they are being started."""
        return {rank: process.pid for rank, process in self.crew.processes.items() if process.pid is not None}

    def watch(self, seconds: float) -> None:
        """Note who ends within that time; end the others some moments after the first did not end well."""
        crew = self.crew
        sentinels = {
            process.sentinel: rank for rank, process in crew.processes.items() if rank not in crew.order
        }
        if not sentinels:
            self._started.wait(seconds)
            self._started.clear()
            return
        for sentinel in wait(list(sentinels), seconds):
            assert isinstance(sentinel, int)
            crew.times[sentinels[sentinel]] = time.time()
            crew.order.append(sentinels[sentinel])
            if crew.first_death is None and not self.ended_well(sentinels[sentinel]):
                crew.first_death = time.monotonic()
        if crew.first_death is not None and time.monotonic() - crew.first_death > GRACE_SECONDS:
            self.kill(crew)

    def kill(self, crew: Crew | None = None) -> None:
        """End all workers at once, be they stopped or stuck."""
        crew = crew or self.crew
        for rank, process in crew.processes.items():
            if rank not in crew.order and process.pid is not None:
                crew.ended_by_us.add(rank)
                if is_stopped(process.pid):
                    crew.found_stopped.add(rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
