"""``shoal train`` once all is checked: torchrun's agent runs the workers; we watch, and say how it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from rich.console import Console
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from shoal.launch.failure import FATAL, first_failure
from shoal.launch.progress import Progress
from shoal.launch.rendezvous import STOP, LoopbackRendezvous
from shoal.launch.report import FAILED, FINISHED, STOPPED, Report
from shoal.launch.signals import stoppable
from shoal.launch.worker import Assignment, work
from shoal.plan.resolve import Job
from shoal.train.rundir import RunDirectory

# Signals that mean: finish the step, commit, end.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Attempt:
    """One call of ``shoal train``: the agent works in a thread, so that signals and the screen have the main one."""

    def __init__(self, job: Job, run: RunDirectory, dataset: Path, console: Console) -> None:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
        self.job, self.run = job, run
        self.console = console
        self.rendezvous = LoopbackRendezvous(run.path.name, job.config.fault.timeout)
        spec = WorkerSpec(
            role="shoal",
            local_world_size=job.layout.world,
            rdzv_handler=self.rendezvous,
            entrypoint=work,
            args=(Assignment(job, run.path.resolve(), dataset.resolve(), os.getpid()),),
            max_restarts=job.config.fault.max_restarts,
            monitor_interval=0.1,
        )
        self.agent = LocalElasticAgent(spec, DefaultLogsSpecs(), start_method="forkserver")
        self.result: RunResult | None = None
        self.error: BaseException | None = None
        self.asked = 0.0  # when a signal first asked to stop
        self.told = False  # the workers know
        self.impatient = self.killed = False

    def run_to_end(self) -> Report:
        thread = threading.Thread(target=self._run_agent, name="shoal-agent", daemon=True)
        progress = Progress(self.console, self.run, self.job.config.recipe.steps)
        progress.skip_existing()
        with stoppable(self._on_signal, STOP_SIGNALS), progress:
            thread.start()
            while thread.is_alive():
                thread.join(0.1)
                progress.poll()
                if self.asked and not self.told:
                    self.told = True
                    self.rendezvous.store.set(STOP, "1")
                    progress.say("stopping after this step; Ctrl-C again to stop at once")
                if self.impatient:
                    self.impatient = False
                    self.rendezvous.store.set(FATAL, "0")  # whatever the agent starts again ends by itself
                    self._kill_workers()
        return self._verdict(progress)

    def _run_agent(self) -> None:
        try:
            self.result = self.agent.run()
        except BaseException as error:  # the main thread reports it
            self.error = error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks; a later Ctrl-C insists. Schedulers repeat theirs, and mean no more by it."""
        if self.asked and number == signal.SIGINT and time.monotonic() - self.asked > 1.0:
            self.impatient = self.killed = True
        self.asked = self.asked or time.monotonic()

    def _kill_workers(self) -> None:
        for worker in self.agent.get_worker_group().workers:
            with contextlib.suppress(OSError, TypeError):  # gone already, or not started yet
                os.kill(worker.id, signal.SIGKILL)

    def _verdict(self, progress: Progress) -> Report:
        if self.killed:
            return self._report(
                progress, FAILED, f"stopped at once; the last commit is step {self.run.step()}"
            )
        outcomes = [] if self.result is None else list(self.result.return_values.values())
        if self.result is None or self.result.is_failed() or None in outcomes:
            if self.error is not None and self.result is None:
                return self._report(progress, FAILED, f"the launcher failed: {self.error!r}")
            failures = {} if self.result is None else self.result.failures
            codes = {rank: failure.exitcode for rank, failure in failures.items()}
            failure = first_failure(self.rendezvous.store, self.job.layout.world, codes)
            log = self.run.log(failure.rank)
            return self._report(progress, FAILED, f"{failure}\n  its log: {log}")
        if outcomes[0].stopped:
            step = outcomes[0].step
            where = f"after step {step}, committed" if step else "before the first step"
            return self._report(progress, STOPPED, f"stopped {where}; run the same command to continue")
        return self._report(progress, FINISHED, f"finished {outcomes[0].step} steps")

    def _report(self, progress: Progress, code: int, message: str) -> Report:
        heldout = progress.heldout["heldout_loss"] if progress.heldout else None
        return Report(code, self.run.path, self.run.step(), message, progress.last, heldout)
