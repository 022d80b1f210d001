"""One rank's training loop: from a job to a finished run, or to a commit when asked to stop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from shoal.models.initial import no_weights
from shoal.observe.collectives import CollectiveCounter
from shoal.observe.flight_recorder import (
    COMMIT,
    EVALUATE,
    FIRST_STEP,
    INPUT,
    REFERENCE,
    RESTORE,
    STEP,
    Announce,
    no_announce,
)
from shoal.parallel.compile import cache_counts
from shoal.parallel.mesh import Mesh
from shoal.plan.resolve import Job
from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.checkpoint.stored_rows import StoredRows
from shoal.train.commits import Commits
from shoal.train.data.collection import Collection
from shoal.train.data.loader import Batch
from shoal.train.evaluate import Patience, evaluates_after, heldout_means, sample_rows
from shoal.train.files import StepFile, read_rows
from shoal.train.first_weights import first_weights
from shoal.train.guard.corruption import CorruptionGuard
from shoal.train.guard.nonfinite import NonFiniteGuard
from shoal.train.guard.out_of_memory import explaining
from shoal.train.guard.spikes import WINDOW, SpikeGuard
from shoal.train.guard.stragglers import Stragglers
from shoal.train.metrics.compare import Comparison
from shoal.train.metrics.meter import Meter, finite
from shoal.train.metrics.observed import OBSERVED_STEP, counter_of, observed
from shoal.train.metrics.sample_log import SampleLog
from shoal.train.outcome import RESUMED, Outcome
from shoal.train.program import Program
from shoal.train.reference import ReferenceStore
from shoal.train.run_directory import EARLY, RunDirectory, identity
from shoal.train.scratch_files import open_files
from shoal.train.state import State
from shoal.train.step import IssuedStep, StepResult


@dataclass(frozen=True)
class _InFlight:
    """A step that was issued and not yet read, and what its metrics row needs."""

    step: int
    micro_batches: list[Batch]
    targets: int
    waited: float  # for its input, on the host
    issued: IssuedStep

    @property
    def without_input(self) -> float:
        """The step's seconds without the wait for input, once it is read. A wait while the device ran the previous
        step does not count.
        """
        idle = self.issued.idle_before
        return self.waited if idle is None else min(self.waited, idle)


class TrainingObserver(Protocol):
    """An observer, called with what a rank does and, before the first step, with its training."""

    def enter(self, phase: str, step: int) -> None: ...

    def meet(self, training: Training) -> None: ...


def train(
    job: Job,
    run: RunDirectory,
    dataset: Path,
    mesh: Mesh,
    wants_stop: Callable[[], bool],
    announce: Announce = no_announce,
    attempt: str = "0",
    restarts: int = 0,
    guest: TrainingObserver | None = None,
    set_aside: Sequence[int] = (),
) -> Outcome:
    """Train from the run's last commit, or from the start, to the last step of the recipe.

    ``attempt`` is a unique name for this attempt at the run; ``restarts`` attempts came before it. ``guest`` observes.
    ``set_aside``: steps in memory that must not be resumed from.
    """
    with explaining(job, mesh) as witness:
        training = Training(job, run, dataset, mesh, announce, attempt, set_aside, wants_stop)
        if mesh.rank == 0 and mesh.hosts.store is not None:
            mesh.hosts.store.set(RESUMED, str(training.done))
        if restarts and mesh.rank == 0:
            run.note_fault(kind="restart", attempt=restarts, resumed_step=training.done)
        witness.training = training
        if guest is not None:
            guest.meet(training)
        return training.run_to_end(wants_stop)


class Training:
    """One rank's part of a run: built from the job, then stepped to the end."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        dataset: Path,
        mesh: Mesh,
        announce: Announce = no_announce,
        attempt: str = "0",
        set_aside: Sequence[int] = (),
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """``announce`` is called with what comes next, because some of it may take long; ``wants_stop`` is polled
        meanwhile.
        """
        config, recipe = job.config, job.config.recipe
        self.job, self.run, self.mesh = job, run, mesh
        self.announce = announce
        self.first_rank = mesh.rank == 0
        self.attempt = attempt
        self.ledger: SampleLog | None = None
        if config.run.ledger and mesh.first_of_replica:
            self.ledger = SampleLog(run.ledger, mesh.rank, attempt)

        data = Collection.open(dataset)
        self.files = open_files(job, run.path, mesh.rank)
        self.program = Program(job, data, mesh, no_weights, self.files)
        self.loader, self.step = self.program.loader, self.program.step
        placed, scale = self.program.placed, self.program.scale
        self.guard = NonFiniteGuard(config.fault.nonfinite, scale.enabled)

        self.state = State(job.network, placed, self.program.optimizer, recipe, scale, mesh)
        origin = identity(job, data.fingerprint)
        self.commits = Commits(
            self.state, run, mesh, config.checkpoint, recipe.clock, origin, attempt, set_aside
        )
        self.step.before_update = self._before_update
        self.announce(RESTORE, 0)
        if placed.frozen:
            placed.fill_frozen(first_weights(job))
        self.complete = True  # has everything that a step needs
        filled = self._compare_with_first_weights(wants_stop)
        self.done = self.commits.restore()
        if not self.done:
            if not filled:
                placed.fill(first_weights(job))
            if self.step.average is not None:
                self.step.average.start()
        self.stored_rows: StoredRows | None = None
        if self.first_rank and isinstance(run.disk, ObjectStore):
            # Fetch stored rows first: some guards start from them.
            self.stored_rows = StoredRows(run.disk, run.metrics)
            self.stored_rows.bring(self.done)
        self.corruption = CorruptionGuard(self.step, config.fault.check_every, self.done)
        self.spikes = SpikeGuard.from_rows(self._last_rows(), config.fault.spike, config.fault.on_spike)
        self.step.refuse_above = self.spikes.refuse_above
        self.patience = Patience(config.evaluate.patience, self._last_evaluations())
        self.stragglers = Stragglers(mesh, config.fault.straggler)
        self.steps_here = 0
        self._told_eager = False
        self._in_flight: _InFlight | None = None
        # Read a step's numbers while the device computes the next step. A CPU has already computed them on return, and
        # whatever may have to be redone or done differently is then known before the next step.
        self.runs_ahead = (
            mesh.device.type == "cuda"
            and config.fault.nonfinite == "skip"
            and config.fault.on_spike == "warn"
            and not (scale.enabled or config.run.strict)
        )
        self.meter = Meter(job, mesh)
        if self.first_rank:
            self.metrics = StepFile(run.metrics, self.done)
            if self.stored_rows is not None:
                self.stored_rows.begin()
            self.samples = StepFile(run.samples, self.done)
            self.comparison = Comparison(job, run.read_plan(), mesh.device.type == "cuda")
        self.commits.before_commit = self._settle_rows

    def _compare_with_first_weights(self, wants_stop: Callable[[], bool]) -> bool:
        """Give a loss with a reference its reference values, cached or computed from the initial weights. Returns
        whether they are available.
        """
        config, program = self.job.config, self.program
        if not config.recipe.loss_facts.reference:
            return False
        store = ReferenceStore.of(self.job, self.run.path)
        most = config.evaluate.batches * config.recipe.batch
        reference = program.reference(1, config.recipe.steps, most, store)
        if not reference.missing:
            return False
        store.check_weights()
        program.placed.fill(first_weights(self.job))
        self.announce(REFERENCE, 0)
        self.complete = program.compute_reference(reference, wants_stop)
        self.announce(RESTORE, 0)
        return True

    def run_to_end(self, wants_stop: Callable[[], bool]) -> Outcome:
        stopped = False
        steps = self.loader.steps(self.done + 1, self.job.config.recipe.steps, self.program.positions)
        with closing(steps), self.stragglers:
            self.stragglers.begin()
            self.meter.start()
            for step, micro_batches in steps:
                self.announce(STEP if self.steps_here else FIRST_STEP, step)
                counter = self._counter()
                with counter or nullcontext():
                    targets, asking = self.step.agree(self.program.own_targets(micro_batches), wants_stop())
                if asking or not self.complete:
                    stopped = True
                    break
                self.meter.have_input()
                self._one_step(step, micro_batches, targets, counter)
                if self.patience.over:
                    break
                self.announce(INPUT, step + 1)
                self.stragglers.begin()
            self.settle()
        self.announce(COMMIT, self.done)
        self.commits.finish(self.done, stopped)
        if self.first_rank:
            self.metrics.sync()
        if self.files is not None:
            self.files.close()
        return Outcome(stopped, self.done)

    def _one_step(
        self, step: int, micro_batches: list[Batch], targets: int, counter: CollectiveCounter | None
    ) -> None:
        batches = [batch.to(self.mesh.device) for batch in micro_batches]
        self.steps_here += 1
        issue = partial(self.step.issue, step, batches, targets)
        in_flight = partial(_InFlight, step, micro_batches, targets, self.meter.waited)
        if self._read_late(step):
            before, self._in_flight = self._in_flight, in_flight(issue())
            if before is not None:
                self._finish(before, self.guard.judge(before.step, before.issued.read()))
            return
        self.settle()
        with self._observation(step, batches, counter):
            flight = in_flight(issue())
            result = self.guard.judge(step, flight.issued.read(), lambda: issue().read())
        self._finish(flight, result)
        self.meter.start()

    def _read_late(self, step: int) -> bool:
        """Whether the next step may be issued before this one's results are read.

        Not where its state is inspected or saved, and not for the first steps, which may be observed.
        """
        config = self.job.config
        last = step == config.recipe.steps
        return (
            self.runs_ahead
            and self.steps_here > OBSERVED_STEP
            and not (self._evaluates(step) or self.commits.keeps(step, last) or self.corruption.due(step))
        )

    def settle(self) -> None:
        """Read the last issued step, if it has not been read yet."""
        if self._in_flight is not None:
            flight, self._in_flight = self._in_flight, None
            self._finish(flight, self.guard.judge(flight.step, flight.issued.read()))

    def _finish(self, flight: _InFlight, result: StepResult) -> None:
        """Do everything that follows from a step's results."""
        config, step = self.job.config, flight.step
        last = step == config.recipe.steps
        self.meter.stop()
        self.stragglers.end()
        # Check the state before it is committed to disk: an unverified commit is useless when it is needed.
        vouched = self.corruption.due(step) or (config.fault.check_every and self.commits.due(step, last))
        if vouched:
            self.corruption.after_step(step)
        self.done = step

        for news in (self.spikes.judge(step, result.loss, result.grad_norm), self.stragglers.compare(step)):
            if self.first_rank and news is not None:
                self.run.note_fault(**news)
        if self.first_rank and (told := self.guard.told(step, result)) is not None:
            self.run.note_fault(**told)
        if self.ledger is not None:
            self.ledger.add(step, flight.micro_batches)
        row = {**self.meter.row(step, result, flight.targets, flight.without_input), "attempt": self.attempt}
        row["commit_wait_s"] = self.commits.take_waited()  # between the previous step and this one
        if self._evaluates(step):
            row.update(self._evaluate())
            self.patience.add(row["heldout_loss"])
            if self.patience.over and not last:
                last = row[EARLY] = True
        row.update(self._compiled(step))
        if self.first_rank:
            # Predictions are for steps of the full batch.
            whole = self.loader.clock.at(step) == config.recipe.batch
            if whole and (measured := self.comparison.add(row)) is not None:
                self.run.note_measured(measured)
            self.metrics.append(row)
        self.announce(COMMIT, step)
        self.commits.hear()
        self.commits.after_step(step, last, row.get("heldout_loss"))
        if vouched and self.mesh.device.type == "cpu":
            # On a GPU the copy to be committed may still be in flight to the host.
            self.corruption.confirm(step)

    def _evaluates(self, step: int) -> bool:
        return evaluates_after(step, self.job.config.recipe.steps, self.job.config.evaluate)

    def _compiled(self, step: int) -> dict[str, Any]:
        """For a process's first metrics row: compile time, and what was found in the cache.

        A rank that could not compile says so, once, in its log; the first rank also tells the user.
        """
        compiled = self.program.placed.compiled
        if compiled is None:
            return {}
        if compiled.problem is not None and not self._told_eager:
            self._told_eager = True
            print(f"step {step}: blocks run eager: {compiled.problem}", flush=True)
            if self.first_rank:
                self.run.note_fault(kind="compile", step=step, action=f"blocks run eager: {compiled.problem}")
        if self.steps_here > 1:
            return {}
        return {"compiled": {"seconds": compiled.seconds, **cache_counts()._asdict()}}

    def _before_update(self) -> None:
        """Everything that must happen before the weights change."""
        self.commits.hold_update()
        self.corruption.before_update()

    def _last_rows(self) -> list[dict[str, Any]]:
        """The first rank's last metrics rows, on every rank, so that all judge alike."""
        rows = read_rows(self.run.metrics) if self.first_rank else []
        kept = [row for row in rows if row["step"] <= self.done][-WINDOW:]
        few = [{name: row[name] for name in ("loss", "grad_norm")} for row in kept]
        told: list[dict[str, Any]] = json.loads(self.mesh.hosts.broadcast(json.dumps(few)))
        return told

    def _last_evaluations(self) -> list[float | None]:
        """The losses of all evaluations so far, on every rank, so that all stop alike."""
        rows = read_rows(self.run.metrics) if self.first_rank and self.job.config.evaluate.patience else []
        losses = [row["heldout_loss"] for row in rows if row["step"] <= self.done and "heldout_loss" in row]
        told: list[float | None] = json.loads(self.mesh.hosts.broadcast(json.dumps(losses)))
        return told

    def _settle_rows(self) -> None:
        """Flush rows to disk: rows up to a commit must survive whatever the commit survives. Raises if there is no
        room.
        """
        if self.ledger is not None:
            self.ledger.flush()
        if self.first_rank:
            self.metrics.sync()
        if self.stored_rows is not None:
            self.stored_rows.add()

    def _counter(self) -> CollectiveCounter | None:
        """Counts collectives in this process's second step, if asked for, from its first message on."""
        watching = self.job.config.run.observe and self.steps_here + 1 == OBSERVED_STEP
        return counter_of(self.step) if watching else None

    def _observation(
        self, step: int, batches: list[Batch], counter: CollectiveCounter | None
    ) -> AbstractContextManager[None]:
        if counter is None:
            return nullcontext()
        return observed(self.step, batches, self.run.observed(self.mesh.rank), step, counter)

    def _evaluate(self) -> dict[str, Any]:
        """Metrics for the row: the loss that judges the run and, if there are several validation sets, the loss of
        each.
        """
        evaluate, recipe, placed = self.job.config.evaluate, self.job.config.recipe, self.program.placed
        if not self.loader.validation:
            return {"heldout_loss": None}
        self.announce(EVALUATE, self.done)
        tell = partial(self.announce, EVALUATE, self.done)
        at_once = self.job.layout.accumulation(recipe.batch)
        most = evaluate.batches * recipe.batch
        with self.program.evaluated_weights():
            found = {
                name: heldout_means(placed, samples, self.mesh, most, self.program.micro, at_once, tell) or []
                for name, samples in self.loader.validation.items()
            }
            means = {name: [finite(one) for one in values] for name, values in found.items()}
            losses = {name: next(iter(values), None) for name, values in means.items()}
            if _writes_samples(self.mesh):
                rows = sample_rows(
                    placed, self.loader, self.program.tokenizer, self.mesh, evaluate, recipe.seed, self.done
                )
                for row in rows if self.first_rank else ():
                    self.samples.append(row)
            self.mesh.hosts.wait_for_first_rank()
        named = {"validation": losses} if evaluate.sources else {}
        watched = means.get(evaluate.watched, [])[1:]
        reported = {f"heldout_{name}": one for name, one in zip(placed.measures, watched, strict=False)}
        return {"heldout_loss": losses.get(evaluate.watched), **reported, **named}


def _writes_samples(mesh: Mesh) -> bool:
    """Whether this rank takes part in generating text: one replica of the model does, with all its ranks."""
    if mesh.layout.ep > 1:  # experts may be spread over replicas
        return True
    return mesh.coords["dp"] == 0 and (mesh.coords["fsdp"] == 0 or mesh.layout.zero == 3)
