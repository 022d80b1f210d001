"""``shoal train`` once all is checked: torchrun's agent runs the workers; we watch, and say how it ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from rich.console import Console
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from shoal.launch.failure import FATAL, STALLED, Failure, first_failure
from shoal.launch.progress import Progress
from shoal.launch.rendezvous import ROUND, STOP, LoopbackRendezvous
from shoal.launch.report import FAILED, FINISHED, STOPPED, Report
from shoal.launch.signals import STOP_SIGNALS, stoppable
from shoal.launch.worker import Assignment, work
from shoal.plan.resolve import Job
from shoal.train.guard.watchdog import Limits, Watchdog
from shoal.train.rundir import RunDirectory

# How long we wait for the agent's thread once its workers were told to end.
END_SECONDS = 30.0


class Attempt:
    """One call of ``shoal train``: the agent works in a thread, so that signals and the screen have the main one."""

    def __init__(self, job: Job, run: RunDirectory, dataset: Path, console: Console) -> None:
        # What they have to say, we say ourselves, once and in a line.
        for chatty in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
            logging.getLogger(chatty).setLevel(logging.CRITICAL + 1)
        self.job, self.run = job, run
        self.console = console
        fault = job.config.fault
        self.rendezvous = LoopbackRendezvous(run.path.name, fault.timeout)
        self.watchdog: Watchdog | None = None
        if fault.stall:
            self.watchdog = Watchdog(run, job.layout.world, Limits.of(fault.stall, fault.timeout))
        spec = WorkerSpec(
            role="shoal",
            local_world_size=job.layout.world,
            rdzv_handler=self.rendezvous,
            entrypoint=work,
            args=(Assignment(job, run.path.resolve(), dataset.resolve()),),
            max_restarts=fault.max_restarts,
            monitor_interval=0.1,
        )
        self.agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull), start_method="forkserver")
        self.result: RunResult | None = None
        self.error: BaseException | None = None
        self.asked = 0.0  # when a signal first asked to stop
        self.told = False  # the workers know
        self.insisted = False  # a second Ctrl-C

    def run_to_end(self) -> Report:
        thread = threading.Thread(target=self._run_agent, name="shoal-agent", daemon=True)
        progress = Progress(self.console, self.run, self.job.config.recipe.steps)
        with stoppable(self._on_signal, STOP_SIGNALS), progress:
            thread.start()
            try:
                while thread.is_alive() and not self.insisted:
                    thread.join(0.1)
                    progress.poll()
                    self._watch(progress)
                    if self.asked and not self.told:
                        self.told = True
                        self.rendezvous.store.set(STOP, "1")
                        progress.say("stopping after this step; Ctrl-C again to stop at once")
            finally:
                # Whatever ended the watch, no worker may go on unwatched.
                if thread.is_alive():
                    self._end_workers(thread)
        return self._verdict(progress)

    def _run_agent(self) -> None:
        try:
            self.result = self.agent.run()
        except BaseException as error:  # the main thread reports it
            self.error = error

    def _watch(self, progress: Progress) -> None:
        """A stalled attempt is ended, and what was seen of it is kept. The agent decides whether another one begins."""
        if self.watchdog is None:
            return
        processes = self._processes()
        verdict = self.watchdog.poll(processes)
        if verdict is None:
            return
        failure = Failure(verdict.rank, verdict.message, True, time.time(), "stalled")
        self.rendezvous.attempt().set(STALLED, json.dumps(asdict(failure)))
        action = f"stacks of all ranks are in {self.run.stacks}"
        with contextlib.suppress(OSError):
            self.run.note_fault(kind="stall", action=action, message=str(failure), **verdict.row)
        # What ends the last attempt is the run's last word, and said then.
        if int(self.rendezvous.store.get(ROUND)) <= self.job.config.fault.max_restarts:
            progress.say(str(failure))
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _processes(self) -> list[int]:
        """The workers' processes in the order of their ranks; fewer while they are being started."""
        workers = sorted(self.agent.get_worker_group().workers, key=lambda worker: worker.global_rank)
        return [worker.id for worker in workers if isinstance(worker.id, int)]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks; a later Ctrl-C insists. Schedulers repeat theirs, and mean no more by it."""
        if self.asked and number == signal.SIGINT and time.monotonic() - self.asked > 1.0:
            self.insisted = True
        self.asked = self.asked or time.monotonic()

    def _end_workers(self, thread: threading.Thread) -> None:
        """Kill the workers; those that the agent starts in their place see that it is over."""
        over = Failure(0, "stopped by the launcher", False, time.time())
        self.rendezvous.store.set(FATAL, json.dumps(asdict(over)))
        for worker in self.agent.get_worker_group().workers:
            with contextlib.suppress(OSError, TypeError):  # gone already, or not started yet
                os.kill(worker.id, signal.SIGKILL)
        thread.join(END_SECONDS)

    def _verdict(self, progress: Progress) -> Report:
        if self.insisted:
            return self._report(progress, FAILED, f"stopped at once; {self._last_commit()}")
        outcomes = [] if self.result is None else list(self.result.return_values.values())
        if self.result is None or self.result.is_failed() or None in outcomes:
            if self.error is not None and self.result is None:
                return self._report(progress, FAILED, f"the launcher failed: {self.error!r}")
            failures = {} if self.result is None else self.result.failures
            codes = {rank: failure.exitcode for rank, failure in failures.items()}
            world = self.job.layout.world
            failure = first_failure(self.rendezvous.store, self.rendezvous.attempt(), world, codes)
            log = self.run.log(failure.rank)
            return self._report(progress, FAILED, f"{failure}\n  its log: {log}")
        if outcomes[0].stopped:
            step = outcomes[0].step
            where = f"after step {step}, committed" if step else "before the first step"
            self.run.forget_memory()
            return self._report(progress, STOPPED, f"stopped {where}; run the same command to continue")
        self.run.forget_memory()
        return self._report(progress, FINISHED, f"finished {outcomes[0].step} steps")

    def _last_commit(self) -> str:
        step = self.run.step()
        return f"the last commit is step {step}" if step else "nothing was committed yet"

    def _report(self, progress: Progress, code: int, message: str) -> Report:
        heldout = progress.heldout["heldout_loss"] if progress.heldout else None
        return Report(code, self.run.path, self.run.step(), message, progress.last, heldout, progress.skipped)
