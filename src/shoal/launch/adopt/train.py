"""``shoal train`` as one rank of another launcher (torchrun, srun, mpirun), which handles restarts.

There is no Shoal launcher in between. The first rank does a launcher's work for the run directory: its lock, its files,
the lines for the user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch
from rich.console import Console

from shoal.facts.problem import BadInput
from shoal.facts.redact import redact
from shoal.launch.adopt.launched_rank import LaunchedRank
from shoal.launch.adopt.listener import Listener
from shoal.launch.adopt.output import Output, tell_torchrun
from shoal.launch.adopt.preparation import Prepared, prepare
from shoal.launch.adopt.rank_rendezvous import RankRendezvous
from shoal.launch.assignment import Assignment
from shoal.launch.environment import keep_only_passed
from shoal.launch.errors import describe
from shoal.launch.failure import cause, tell
from shoal.launch.nodes.meet import towards_others
from shoal.launch.progress import Progress
from shoal.launch.rendezvous import STOP
from shoal.launch.report import FAILED, FINISHED, STOPPED, Report
from shoal.launch.worker import take_part
from shoal.parallel.signed_store import SignedStore
from shoal.plan.resolve import Job
from shoal.train.files import OWNER_ONLY
from shoal.train.outcome import Outcome
from shoal.train.run_directory import RunDirectory

# Seconds between two checks for news to print.
LOOK_SECONDS = 0.25
# How long the first rank waits for the reasons of other ranks' failures when it has lost them.
HEAR_SECONDS = 1.0
# How often the launcher has restarted this rank.
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def train(
    job: Job,
    run: RunDirectory,
    told: LaunchedRank,
    fresh: bool,
    console: Console,
    visible: str | None = None,
    name: str | None = None,
) -> Report:
    """Run this process as a rank of the job, to its end. ``name``: this node's name, if not the host's."""
    fresh = fresh and not any(os.environ.get(restarts, "0") != "0" for restarts in RESTARTS)
    call = RankRendezvous(told, job.config.fault.timeout)
    job = towards_others(job, told.host, told.nodes)
    run = RunDirectory(run.path, node_name(told, name))
    with ExitStack() as held:
        try:
            prepared = prepare(job, run, told, fresh, visible, call, console, held)
        except BadInput:
            call.part()
            raise
        if prepared.done is not None:
            call.part()
            return prepared.done
        return _Rank(prepared, told, call, console).run_to_end()


def node_name(told: LaunchedRank, name: str | None) -> str:
    """The name for this node's memory; two nodes on one machine, for trying it out, need two names."""
    return name or (f"{socket.gethostname()}-{told.node}" if told.nodes > 1 else "0")


class _Rank:
    """A rank in training: from here on, errors are reported to the others, and to the user in one line."""

    def __init__(
        self, prepared: Prepared, told: LaunchedRank, call: RankRendezvous, console: Console
    ) -> None:
        self.prepared, self.told, self.call, self.console = prepared, told, call, console
        self.job, self.run = prepared.job, prepared.run
        self.store: SignedStore = call.of_round(call.store)
        self.output = Output()
        self.listener = Listener(call, self.output.say, self._leave_early)

    def run_to_end(self) -> Report:
        os.umask(OWNER_ONLY)
        left_out = keep_only_passed(self.job.config)
        first = self.told.rank == 0
        with ExitStack() as around:
            around.enter_context(self.output.to(self.run.log(self.told.rank)))
            if left_out:
                print(f"not passed on to ranks (see run.environment): {' '.join(left_out)}", flush=True)
            progress = around.enter_context(self._shown()) if first else None
            around.enter_context(self.listener.listening())
            try:
                outcome = self._work()
            except Exception as error:
                return self._failed(error)
            return self._report(outcome, progress)

    def _work(self) -> Outcome:
        told, prepared = self.told, self.prepared
        assignment = Assignment(
            entrypoint="",
            job=self.job,
            run=self.run.path.resolve(),
            dataset=prepared.dataset.path.resolve(),
            secret=self.call.secret,
            attempt=f"{prepared.attempt}-{self.call.number}",
            round=self.call.number,
            node=self.run.node,
            nodes=told.nodes,
            bound=told.local_world > 1 and torch.cuda.device_count() == 1,
        )
        asked = partial(self.store.has, STOP) if told.rank == 0 else bool
        return take_part(
            assignment,
            self.run,
            told.rank,
            told.local_rank,
            self.store,
            asked,
            self.call.number - 1,
            guest=self.listener,
        )

    def _leave_early(self) -> None:
        """Asked to stop while waiting for others, which may be gone: nothing was computed yet."""
        if self.told.rank == 0:
            self.run.no_longer_alive()
        self.output.say("stopped before the first step; run the same command to continue")
        os._exit(STOPPED)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[Progress]:
        """Print progress from a thread, because the main thread computes."""
        job = self.job
        progress = Progress(
            self.output.console, self.run, job.config.recipe.steps, compiles=job.compilation.on
        )
        over = threading.Event()

        def follow() -> None:
            while not over.wait(LOOK_SECONDS):
                with contextlib.suppress(Exception):  # display problems must not end the run
                    progress.poll()

        thread = threading.Thread(target=follow, name="shoal-progress", daemon=True)
        with progress:
            thread.start()
            try:
                yield progress
            finally:
                over.set()
                thread.join()

    # Ending.

    def _report(self, outcome: Outcome, progress: Progress | None) -> Report:
        if self.told.local_rank == 0:
            self.run.forget_memory()
        code, message = FINISHED, f"finished {outcome.step} step{'s' * (outcome.step != 1)}"
        if outcome.stopped:
            where = f"after step {outcome.step}, committed" if outcome.step else "before the first step"
            code, message = STOPPED, f"stopped {where}; run the same command to continue"
        if progress is None:
            return Report(code, self.run.path, outcome.step, message, None, None)
        progress.poll()
        heldout = progress.heldout["heldout_loss"] if progress.heldout else None
        return Report(code, self.run.path, outcome.step, message, progress.last, heldout, progress.skipped)

    def _failed(self, error: Exception) -> Report:
        """The first rank records the root cause; a rank with an error of its own tells the user, and torchrun."""
        rank = self.told.rank
        failure = describe(rank, error)
        with contextlib.suppress(Exception):  # the store may be what is gone
            tell(self.store, self.store, rank, failure)
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        if rank == 0:
            with contextlib.suppress(Exception):
                time.sleep(HEAR_SECONDS)
                failure = cause(self.store, self.store, self.told.world)
            row = {"kind": failure.kind, "rank": failure.rank, "message": str(failure), **failure.more}
            action = f"left to {self.told.by} to restart"
            self.run.note_fault(
                **{"step": self.run.step(), **row, "action": action, "attempt": self.call.number}
            )
        log = self.run.log(rank)
        if rank == 0 or not failure.echo:
            message = f"{failure}\n  its log: {log}"
            tell_torchrun(str(failure))
            self.output.say(message)
        return Report(FAILED, self.run.path, 0, redact(str(failure)), None, None)
