"""Training on this machine: everything is checked, then torchrun's elastic agent runs one worker a rank."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from shoal.facts import local as machine
from shoal.facts.problem import BadInput
from shoal.launch.data import prepared
from shoal.launch.manifest import describe_plan, describe_run
from shoal.launch.progress import Progress
from shoal.plan.resolve import Job
from shoal.train.data.dataset import Dataset, check_vocabulary
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.rundir import RunDirectory

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

FINISHED, FAILED, STOPPED = 0, 1, 75

# What workers find imported. torch's optimizers import its compiler on first use, which takes two seconds.
PRELOAD = ("shoal.launch.worker", "torch._dynamo")

# Signals that mean: finish the step, commit, end.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Report:
    """How a call of ``train`` ended."""

    code: int
    run: Path
    step: int
    message: str
    row: dict[str, Any] | None  # the last step's metrics
    heldout_loss: float | None


def train(job: Job, run: RunDirectory, fresh: bool, console: Console) -> Report:
    """Train ``job`` in ``run`` to its end, from wherever it stands. Bad input raises before anything is spawned."""
    _check_devices(job)
    run.check_free()
    dataset = _dataset(job, console)
    if not fresh:
        run.check_continues(job, Dataset.open(dataset).fingerprint)
    _check_weights(job)
    if fresh and run.path.exists():
        console.print(f"moved the old run to {run.move_aside()}", highlight=False)
    with run.held():
        steps = job.config.recipe.steps
        if run.step() >= steps:
            return Report(
                FINISHED, run.path, run.step(), f"finished already: {steps} steps are done", None, None
            )
        _warm_workers()
        if run.step():
            console.print(f"continuing {run.path} after step {run.step()}", highlight=False)
        run.write_start(job, describe_run(job, dataset), describe_plan(job))
        return _Attempt(job, run, dataset, console).run_to_end()


def _check_devices(job: Job) -> None:
    """A described cluster can be planned for anywhere; trained on only where it is."""
    if job.cluster.device.name == "cpu":
        return
    here = machine.look(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if here.device.name == "cpu" or here.devices < job.layout.world:
        found = "no GPU" if here.device.name == "cpu" else f"{here.devices}x{here.device.name}"
        raise BadInput(
            f"layout {job.layout} wants {job.layout.world} x {job.cluster.device.name}; this machine has {found}",
            "--set cluster.on=local, or --set cluster.on=4xcpu for processes on the CPU",
        )


def _dataset(job: Job, console: Console) -> Path:
    """The tokenised data, refused where it has ids that the model has no row for."""
    data = job.config.data
    tokenizer = open_tokenizer(data.tokenizer, data.end_token)
    if tokenizer.end >= job.model.vocab:  # known without reading any text, for every document ends in it
        raise BadInput(
            f"tokenizer {data.tokenizer} ends documents with id {tokenizer.end}, "
            f"but {job.model.name} has a vocabulary of {job.model.vocab}",
            f"a model with a vocabulary of at least {tokenizer.vocab}",
        )
    path = prepared(data, console)
    check_vocabulary(Dataset.open(path), job.model.vocab)
    return path


def _check_weights(job: Job) -> None:
    if job.config.model.init_from is not None:
        from shoal.models.huggingface import WeightFiles

        WeightFiles(Path(job.config.model.init_from).expanduser(), job.model)


def _warm_workers() -> None:
    """Start the server that workers are forked from, with torch already imported: a restart then costs no import."""
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()


class _Attempt:
    """One call of ``shoal train``: the agent works in a thread, so that signals and the screen have the main one."""

    def __init__(self, job: Job, run: RunDirectory, dataset: Path, console: Console) -> None:
        # torch takes seconds to import, and bad input is answered without it.
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        from shoal.launch.rendezvous import LoopbackRendezvous
        from shoal.launch.worker import Assignment, work

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
        self.signals = 0

    def run_to_end(self) -> Report:
        thread = threading.Thread(target=self._run_agent, name="shoal-agent", daemon=True)
        progress = Progress(self.console, self.run, self.job.config.recipe.steps)
        progress.skip_existing()
        with _handled(STOP_SIGNALS, self._on_signal), progress:
            thread.start()
            asked = False
            while thread.is_alive():
                thread.join(0.1)
                progress.poll()
                if self.signals and not asked:
                    asked = True
                    self._ask_to_stop()
                    progress.say("stopping after this step; once more to stop at once")
                if self.signals > 1:
                    self._kill_workers()
                    return self._report(progress, FAILED, "stopped at once, without a commit")
        return self._verdict(progress)

    def _run_agent(self) -> None:
        try:
            self.result = self.agent.run()
        except BaseException as error:  # the main thread reports it
            self.error = error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1

    def _ask_to_stop(self) -> None:
        from shoal.launch.rendezvous import STOP

        self.rendezvous.store.set(STOP, "1")

    def _kill_workers(self) -> None:
        for worker in self.agent.get_worker_group().workers:
            with contextlib.suppress(OSError, TypeError):  # gone already, or not started yet
                os.kill(worker.id, signal.SIGKILL)

    def _verdict(self, progress: Progress) -> Report:
        from shoal.launch.failure import first_failure

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
            again = "run the same command to continue"
            return self._report(
                progress, STOPPED, f"stopped after step {outcomes[0].step}, committed; {again}"
            )
        return self._report(progress, FINISHED, f"finished {outcomes[0].step} steps")

    def _report(self, progress: Progress, code: int, message: str) -> Report:
        heldout = progress.heldout["heldout_loss"] if progress.heldout else None
        return Report(code, self.run.path, self.run.step(), message, progress.last, heldout)


@contextlib.contextmanager
def _handled(signals: tuple[signal.Signals, ...], handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
