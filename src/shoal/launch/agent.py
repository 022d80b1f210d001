"""torchrun's elastic agent, extended to record the order in which workers exit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from shoal.launch.failure import Death
from shoal.train.guard.processes import is_gone, is_stopped

# After a first death its peers are ended within this time: torch's agent may be busy with something else.
GRACE_SECONDS = 0.25
# Seconds between two checks for workers stopped by a signal or a debugger.
STOPPED_SECONDS = 0.25


@dataclass
class WorkerProcesses:
    """The processes of one attempt on this machine, by rank."""

    processes: dict[int, BaseProcess] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)  # when each end was noticed
    first_death: float | None = None
    ended_by_us: set[int] = field(default_factory=set)  # by this launcher, or torch's agent in it
    found_stopped: set[int] = field(default_factory=set)  # by a signal or a debugger, when we ended them
    stopped: set[int] = field(default_factory=set)  # at the last look: a stack dump makes them continue
    looked: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def running(self) -> dict[int, int]:
        """Processes whose end was not noticed yet: the handle that becomes readable at the end, and the rank."""
        return {one.sentinel: rank for rank, one in self.processes.items() if rank not in self.ended}

    def note_ends(self, seconds: float = 0.0) -> None:
        """Note which processes end within this time; called by the watching thread and by the judging one."""
        running = self.running()
        found = [running[one] for one in wait(list(running), seconds) if isinstance(one, int)]
        now = time.time()
        with self.lock:
            self.ended = {**self.ended, **dict.fromkeys([one for one in found if one not in self.ended], now)}

    def deaths(self) -> list[Death]:
        """Deaths so far, first one first; of simultaneous ones, those that we ended come last.

        The agent calls this when it is done with the processes: only one reader gets an exit code.
        """
        self.note_ends()
        moments = [*dict.fromkeys(self.ended.values())]  # in order of arrival, whatever the clock did
        found = [
            Death(
                rank=rank,
                time=self.ended.get(rank, time.time()),
                code=self.processes[rank].exitcode if rank in self.ended else None,
                by_us=rank in self.ended_by_us,
                stopped=rank in self.found_stopped,
            )
            for rank in [
                *self.ended,
                *sorted(self.found_stopped - self.ended.keys()),
            ]  # the latter were only found now
        ]
        moments += [one.time for one in found]
        return sorted(found, key=lambda one: (moments.index(one.time), one.by_us, (one.code or 0) >= 0))

    def end(self, rank: int) -> None:
        """End a rank at once, even if it is stopped or stuck. Noted first, so that its death does not pass for the
        cause.
        """
        pid = self.processes[rank].pid
        if rank in self.ended or pid is None or is_gone(pid):
            return
        self.ended_by_us.add(rank)
        if rank in self.stopped or is_stopped(pid):
            self.found_stopped.add(rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Agent(LocalElasticAgent):
    """Starts workers from a warm server. torch's agent reports the lowest rank that died; this one the first that
    did.
    """

    def __init__(self, spec: WorkerSpec, ended_well: Callable[[int], bool]) -> None:
        """``ended_well``: whether a rank whose process is over had nothing left to do."""
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull), start_method="forkserver")
        # Each node has the same number of ranks, so agents need not exchange them through a store that any process can
        # write to, with a node that may have been lost meanwhile.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        self.ended_well = ended_well
        self.crew = WorkerProcesses()
        self._started = threading.Event()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self.crew = WorkerProcesses()
        started: dict[int, int] = super()._start_workers(worker_group)
        # multiprocessing.active_children() drops processes that have ended: a rank that failed at once, and why. torch
        # holds them all, but under no public name; the same in versions 2.11 to 2.13.
        children = {process.pid: process for process in self._pcontext._pc.processes}  # type: ignore[union-attr]
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        found = {ranks[local]: children[pid] for local, pid in started.items() if pid in children}
        crew = WorkerProcesses(found)
        for rank, process in found.items():
            # torch calls this as soon as a peer has died. It would send a SIGTERM, indistinguishable from another
            # process's, and wait half a minute for a stopped process.
            vars(process)["terminate"] = partial(crew.end, rank)
        self.crew = crew
        self._started.set()
        return started

    def _exit_barrier(self) -> None:
        """Do nothing: agents of several nodes would wait for each other; their launchers do, and know which node is
        lost.
        """

    def _shutdown(self, *given: Any, **named: Any) -> None:
        """End the workers, also if something the agent calls between two looks has raised.

        torch passes different arguments in the versions we support: 2.13 has a timeout, 2.11 none.
        """
        self.kill()
        super()._shutdown(*given, **named)

    def forget_restarts(self) -> None:
        """Do not count the next start as a restart: the last workers ended well. torch has no public counter."""
        self._remaining_restarts = self._worker_group.spec.max_restarts

    def processes(self) -> Mapping[int, int]:
        """Process ids of the current attempt's workers by rank; none while they are being started."""
        return {rank: process.pid for rank, process in self.crew.processes.items() if process.pid is not None}

    def watch(self, seconds: float) -> None:
        """Note which processes end within this time; end the others shortly after the first one fails."""
        crew = self.crew
        if crew.running():
            crew.note_ends(seconds)
        else:
            self._started.wait(seconds)
            self._started.clear()
        if crew.first_death is None and not all(map(self.ended_well, [*crew.ended])):
            crew.first_death = time.monotonic()
        if time.monotonic() - crew.looked >= STOPPED_SECONDS:
            crew.looked = time.monotonic()
            crew.stopped = {rank for rank, process in crew.processes.items() if is_stopped(process.pid or 0)}
        if crew.first_death is not None and time.monotonic() - crew.first_death > GRACE_SECONDS:
            self.kill(crew)

    def kill(self, crew: WorkerProcesses | None = None) -> None:
        """End all workers at once, even if they are stopped or stuck."""
        crew = crew or self.crew
        for rank in crew.processes:
            crew.end(rank)
