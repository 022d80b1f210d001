"""One attempt of ``shoal train``: torchrun's agent runs the workers; the launcher watches and reports how it ended."""

from __future__ import annotations

import json
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec

from shoal.facts.redact import redact
from shoal.launch.agent import Agent
from shoal.launch.assignment import Assignment, begin
from shoal.launch.failure import FATAL, STALL, STALLED, Death, Failure, cause
from shoal.launch.interfaces import address_of
from shoal.launch.manifest import describe_plan
from shoal.launch.progress import GIVING_UP, Progress
from shoal.launch.redacted import LogRedactor
from shoal.launch.rendezvous import STOP, LoopbackRendezvous, Rendezvous
from shoal.launch.report import FAILED, FINISHED, STOPPED, Report
from shoal.launch.restart import GaveUp, Interrupted, Restarts
from shoal.launch.signals import STOP_SIGNALS, stoppable
from shoal.observe.flight_recorder import END, FlightReader
from shoal.parallel.signed_store import Tampered
from shoal.plan.refit import refit
from shoal.plan.resolve import Job
from shoal.train.guard.stacks import shown
from shoal.train.guard.watchdog import Limits, Watchdog
from shoal.train.guard.watched_ranks import LocalRanks
from shoal.train.run_directory import RunDirectory

# Seconds between two looks at the workers. A worker's end is noticed at once.
LOOK_SECONDS = 0.05
# torch counts restarts from the beginning of a run, however long it goes well. We count those without progress.
AS_OFTEN_AS_WE_SAY = 10**9

# How long to wait for the agent's thread after its workers were told to end.
END_SECONDS = 30.0


class Supervisor:
    """One call of ``shoal train``. The agent runs in a thread, so that the main thread handles signals and the
    screen.
    """

    leads = True  # whether it writes what is written once per run

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        dataset: Path,
        console: Console,
        entrypoint: str,
        devices: Callable[[], int | None] = lambda: None,
    ) -> None:
        """``entrypoint``: what workers call, as "module:function". ``devices``: how many exist now, because a fault
        may have removed some; None if any number of ranks can run.
        """
        # We report the same things ourselves, once and in a line.
        for chatty in (
            "torch.distributed.elastic",
            "torch.multiprocessing.spawn",
            "torchelastic-events-null",
        ):
            logging.getLogger(chatty).setLevel(logging.CRITICAL + 1)
        self.job, self.run, self.dataset = job, run, dataset.resolve()
        self.entrypoint = entrypoint
        self.console, self.devices = console, devices
        self.name = secrets.token_hex(4)  # names this launch of the run
        self.rendezvous = self._meet()
        self.rendezvous.store.on_forgery(self._note_tampering)
        self.logs = LogRedactor()
        self.logs.redact(run.logs, self._my_logs())  # logs of an earlier launcher, which may have been killed
        self.restarts = Restarts(run, job.config.fault.max_restarts)
        self.watchdog: Watchdog | None = None
        self.spec = WorkerSpec(
            role="shoal",
            local_world_size=job.processes,
            rdzv_handler=self.rendezvous,
            entrypoint=begin,
            max_restarts=AS_OFTEN_AS_WE_SAY,
            monitor_interval=LOOK_SECONDS,
        )
        self.agent = Agent(self.spec, self._ended_well)
        self.result: RunResult | None = None
        self.error: BaseException | None = None
        self._seen: dict[str, Any] = {}  # the watchdog's verdict on the current attempt
        self._watching = threading.RLock()  # held while the watchdog looks, and while the attempt is judged
        self.asked = 0.0  # when a signal first asked to stop
        self.told = False  # the workers have been told
        self.insisted = False  # a second Ctrl-C

    def _meet(self) -> Rendezvous:
        """Open this attempt's rendezvous."""
        address = address_of(self.job.config.cluster.interface)
        timeout = self.job.config.fault.timeout
        return LoopbackRendezvous(self.run.path.name, timeout, self._before_round, address)

    def _assign(
        self,
        job: Job,
        number: int,
        nodes: int = 1,
        attempt: str | None = None,
        set_aside: tuple[int, ...] = (),
    ) -> None:
        """Set the work of the next round's workers, with the total number of nodes."""
        self.job, fault = job, job.config.fault
        self.spec.local_world_size = job.processes // nodes
        path = self.run.path.resolve()
        secret, name = self.rendezvous.store.secret, attempt or f"{self.name}-{number}"
        more = number, set_aside, self.run.node, nodes
        self.spec.args = (Assignment(self.entrypoint, job, path, self.dataset, secret, name, *more),)
        # Without a configured limit no rank is blamed, but torch's timeout still applies.
        self._watch_over(Limits.of(fault.stall or fault.timeout, fault.timeout, nodes))

    def _watch_over(self, limits: Limits) -> None:
        """Watch the next round's ranks."""
        ranks = LocalRanks(self.run, range(self.job.processes), self.agent.processes)
        self.watchdog = Watchdog(ranks, limits) if self.job.config.fault.stall else None

    def run_to_end(self) -> Report:
        thread = threading.Thread(target=self._run_agent, name="shoal-agent", daemon=True)
        job = self.job
        self.progress = Progress(
            self.console, self.run, job.config.recipe.steps, not self.leads, job.compilation.on
        )
        with stoppable(self.on_signal, STOP_SIGNALS), self.progress:
            thread.start()
            try:
                while thread.is_alive() and not self.insisted and not self._is_hopeless():
                    self.agent.watch(LOOK_SECONDS)
                    self._look_around()
                    if self.asked and not self.told:
                        self.told = True
                        self._ask_to_stop()
                        self.progress.say("stopping after this step; Ctrl-C again to stop at once")
            except Tampered as error:
                self.error = GaveUp(Failure(0, str(error), False, time.time(), kind="tampered"), "")
                self.result = None
            finally:
                # Whatever ended the watch, no worker may continue unwatched.
                if thread.is_alive():
                    self._end_workers(thread)
                self.logs.redact(self.run.logs, self._my_logs())
                # It maps the workers' records into memory.
                self.watchdog = None
        return self._verdict()

    def _my_logs(self) -> list[Path] | None:
        """The logs that this launcher redacts; None: all."""
        return None

    def _look_around(self) -> None:
        """Called often while workers run."""
        self.progress.poll()
        self._watch()
        self.rendezvous.store.look_after()

    def _note_tampering(self, message: str) -> None:
        self.run.note_fault(kind="tampering", step=self.run.step(), action="ignored", message=message)
        self.console.print(message, markup=False)

    def _is_hopeless(self) -> bool:
        """Whether there is nothing left to wait for, although the agent has not ended."""
        return False

    def _ask_to_stop(self) -> None:
        self.rendezvous.store.set(STOP, "1")

    def _run_agent(self) -> None:
        try:
            self.result = self.agent.run()
            while self._goes_on():
                self.result = None
                self.result = self.agent.run()
        except BaseException as error:  # the main thread raises it
            self.error = error.with_traceback(None) if isinstance(error, GaveUp) else error

    def _goes_on(self) -> bool:
        """Whether another round may follow although this round's workers have ended well."""
        return False

    # Faults.

    def _before_round(self, number: int) -> None:
        """Called by the agent before it starts a round's workers; after the first round, because an attempt has
        failed.
        """
        if number > 1:
            self._judge(number - 1)
            self._refit()
        self._assign(self.job, number)

    def _judge(self, ended: int) -> tuple[int, ...]:
        """Decide whether to restart after a failed attempt; returns the commits not to resume from."""
        self.logs.redact(self.run.logs, self._my_logs())
        failure = self._cause()
        decision, failed = self.restarts.judge(failure, self.rendezvous.attempt())
        for place in (self.run.disk, self.run.memory()):
            for doubtful in set(decision.set_aside) & set(place.committed()):
                place.set_aside(doubtful, decision.why)
        row = {**failed.row(), "step": self._step_of(failure.rank), **self._seen, **failure.more}
        action = f"restarting{f'; {decision.why}' * bool(decision.why)}" if decision.again else GIVING_UP
        self._seen = {}
        self.run.note_fault(**{**row, "action": action, "message": str(failure), "attempt": ended})
        if not decision.again:
            raise GaveUp(failure, decision.why)
        return decision.set_aside

    def _refit(self) -> None:
        """If devices are gone, continue the same run on the remaining ones in another layout."""
        there = self.devices()
        if there is None or there >= self.job.layout.world:
            return
        before = self.job.layout
        self.job = refit(self.job, there)
        self.run.note_plan(describe_plan(self.job))
        self.run.note_fault(
            kind="devices",
            step=self.run.step(),
            action=f"continuing with {self.job.layout}",
            message=f"{there} devices are left, but {before} needs {before.world}",
        )

    def _cause(self) -> Failure:
        store, attempt = self.rendezvous.store, self.rendezvous.attempt()
        # Peers of a stalled rank may abort while the watchdog still looks for it: wait for its verdict.
        with self._watching:
            return cause(store, attempt, self.job.processes, self._deaths())

    def _deaths(self) -> Sequence[Death]:
        """Which ranks have ended, first one first."""
        return self.agent.crew.deaths()

    def _step_of(self, rank: int) -> int:
        """The step that a rank was in when last seen."""
        snapshot = FlightReader(self.run.flight(rank)).look()
        return snapshot.step if snapshot is not None else 0

    def _ended_well(self, rank: int) -> bool:
        """Whether a rank whose process is over had nothing left to do, so that its end is no failure."""
        snapshot = FlightReader(self.run.flight(rank)).look()
        ours = self.agent.processes().get(rank)
        return snapshot is not None and snapshot.pid == ours and snapshot.phase == END

    def _watch(self) -> None:
        """End a stalled attempt, and keep the verdict. The agent decides whether another one begins."""
        crew = self.agent.crew
        if self.watchdog is None or crew.first_death is not None:
            return
        with self._watching:
            verdict = self.watchdog.poll()
            # No attempt is judged meanwhile; but the current one may have been judged before.
            if verdict is None or crew is not self.agent.crew:
                return
            where = f"stacks and last collectives of all ranks: {shown(str(self.run.stacks))}"
            message = f"{verdict.message}\n  {where}"
            failure = Failure(verdict.rank, message, True, time.time(), "stalled", STALL)
            self.rendezvous.attempt().set(STALLED, json.dumps(asdict(failure)))
            self._seen = verdict.row
        self.agent.kill(crew)

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """The first signal requests a stop; a later Ctrl-C forces it. Schedulers repeat their signals without
        meaning more.
        """
        if self.asked and number == signal.SIGINT and time.monotonic() - self.asked > 1.0:
            self.insisted = True
        self.asked = self.asked or time.monotonic()

    # Ending.

    def _end_workers(self, thread: threading.Thread) -> None:
        """Kill the workers; any that the agent starts in their place see that it is over."""
        over = Failure(0, "stopped by the launcher", False, time.time(), final=True)
        self.rendezvous.store.set(FATAL, json.dumps(asdict(over)))
        self.agent.kill()
        thread.join(END_SECONDS)

    def _verdict(self) -> Report:
        if self.insisted:
            return self._report(FAILED, f"stopped at once; {self._last_commit()}")
        outcomes = [] if self.result is None else list(self.result.return_values.values())
        if isinstance(self.error, Interrupted):
            why = f"{self.error}; " if str(self.error) else "stopped; "
            return self._report(STOPPED, f"{why}{self._last_commit()}; run the same command to continue")
        if isinstance(self.error, GaveUp):
            log = self.run.log(self.error.failure.rank)
            return self._report(FAILED, f"{self.error}\n  its log: {log}")
        if self.result is None or self.result.is_failed() or None in outcomes:
            if self.error is not None and self.result is None:
                return self._report(FAILED, f"the launcher failed: {self.error!r}")
            failure = self._cause()
            return self._report(FAILED, f"{failure}\n  its log: {self.run.log(failure.rank)}")
        self.run.forget_memory()
        if outcomes[0].stopped:
            step = outcomes[0].step
            where = f"after step {step}, committed" if step else "before the first step"
            return self._report(STOPPED, f"stopped {where}; run the same command to continue")
        return self._report(FINISHED, f"finished {outcomes[0].step} step{'s' * (outcomes[0].step != 1)}")

    def _last_commit(self) -> str:
        step = self.run.step()
        return f"the last commit is step {step}" if step else "nothing has been committed yet"

    def _report(self, code: int, message: str) -> Report:
        progress = self.progress
        heldout = progress.heldout["heldout_loss"] if progress.heldout else None
        return Report(
            code, self.run.path, self.run.step(), redact(message), progress.last, heldout, progress.skipped
        )
