"""``shoal train`` with a parameter server: the agent runs the servers; workers are started here, and again when
lost.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console

from shoal.launch import server
from shoal.launch.assignment import Assignment
from shoal.launch.failure import KILLED, Failure
from shoal.launch.report import FAILED, Report
from shoal.launch.supervisor import Supervisor
from shoal.plan.resolve import Job
from shoal.train.files import last_row
from shoal.train.guard.watchdog import Limits
from shoal.train.run_directory import RunDirectory
from shoal.train.server.serve import LOST

# Seconds within which a process ends after its links are closed, unless it hangs.
LINGERS = 1.0


class ServedSupervisor(Supervisor):
    """Servers are restarted together, as ranks are; each worker separately, while the others continue."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        dataset: Path,
        console: Console,
        entrypoint: str,
        devices: Callable[[], int | None] = lambda: None,
    ) -> None:
        """``entrypoint``: what workers call."""
        super().__init__(job, run, dataset, console, server.ENTRYPOINT, devices)
        self.worker_entrypoint = entrypoint
        self._workers: dict[int, BaseProcess] = {}
        self._incarnations: dict[int, int] = {}
        self._losses: dict[int, int] = {}  # per worker, since the last recorded step
        self._seen_step = 0
        self._round = 0
        self._hopeless: Failure | None = None

    def run_to_end(self) -> Report:
        try:
            return super().run_to_end()
        finally:
            self._end_all()

    def _watch_over(self, limits: Limits) -> None:
        """Servers wait for workers and not for each other, and they notice a worker that does not respond."""
        self.watchdog = None

    def _look_around(self) -> None:
        super()._look_around()
        crew = self.agent.crew
        if not self.agent.processes() or crew.first_death is not None or crew.ended:
            return
        if self._round != self.rendezvous.round:
            self._end_all()
            self._round = self.rendezvous.round
            for number in range(self.job.layout.world):
                self._start(number)
        self._replace_lost()

    def _replace_lost(self) -> None:
        row = last_row(self.run.metrics)
        step = int(row["step"]) if row else 0
        if step > self._seen_step:
            self._seen_step = step
            self._losses.clear()
        attempt = self.rendezvous.attempt()
        for number, process in [*self._workers.items()]:
            silent = False
            if process.exitcode is None and attempt.read(LOST.format(number)) == str(
                self._incarnations[number]
            ):
                # A killed worker's links are gone a moment before the process is.
                process.join(LINGERS)
                if process.exitcode is None:
                    process.kill()
                    process.join()
                    silent = True
            if process.exitcode is None or process.exitcode == 0:
                continue
            if process.exitcode == server.LOST_A_SERVER:
                # A server that dies takes its workers along: the death to report is the server's, seen a moment later.
                self.agent.crew.note_ends(LINGERS)
                if self.agent.crew.ended:
                    return
            del self._workers[number]
            self._losses[number] = self._losses.get(number, 0) + 1
            again = self._losses[number] <= self.job.config.fault.max_restarts
            how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
            if silent:
                how = f"a signal of ours: it did not answer for {self.job.config.fault.timeout:g} s"
            message, log = f"worker {number} ended with {how}", self.run.log(self.job.processes + number)
            action = (
                "the others go on; it is started again" if again else "left out: the others go on without it"
            )
            self.run.note_fault(
                kind="worker lost",
                rank=number,
                step=step,
                action=action,
                message=f"{message}; its log: {log}",
            )
            # Written on the worker's behalf, where users look for what happened to it.
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{message} at step {step}; {action}\n")
            if again:
                self._start(number)
            elif not self._workers:
                message = f"worker {number} fails again and again, and no other is left"
                rank = self.job.processes + number
                self._hopeless = Failure(rank, message, False, time.time(), kind=KILLED)

    def _start(self, number: int) -> None:
        assignment: Assignment = self.spec.args[0]
        incarnation = self._incarnations[number] = self._incarnations.get(number, 0) + 1
        process = multiprocessing.get_context("forkserver").Process(
            target=server.begin_worker,
            args=(
                self.worker_entrypoint,
                (assignment, number, incarnation, self.rendezvous.address, self.rendezvous.port),
            ),
            name=f"shoal-worker-{number}",
            daemon=True,
        )
        process.start()
        self._workers[number] = process

    def _is_hopeless(self) -> bool:
        return self._hopeless is not None

    def _verdict(self) -> Report:
        if self._hopeless is None:
            return super()._verdict()
        log = self.run.log(self._hopeless.rank)
        return self._report(FAILED, f"{self._hopeless.message}\n  its log: {log}")

    def _end_all(self) -> None:
        for process in self._workers.values():
            process.kill()
            process.join()
        self._workers.clear()
