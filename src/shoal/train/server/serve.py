"""One parameter server: serves its workers in threads, updates its range in the main thread, commits with the other
servers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.facts.layout.server_ranges import item_of
from shoal.observe.flight_recorder import COMMIT, EVALUATE, RESTORE, STEP, Announce, no_announce
from shoal.parallel import server as wire
from shoal.parallel.hosts import PATIENCE
from shoal.parallel.mesh import Mesh
from shoal.parallel.server import LinkLost, ServedParameters, ServerLink
from shoal.plan.resolve import Job
from shoal.train import optimizer as optimizers
from shoal.train.commits import Commits
from shoal.train.data.collection import Collection
from shoal.train.evaluate import evaluates_after
from shoal.train.files import StepFile
from shoal.train.first_weights import first_weights
from shoal.train.guard.nonfinite import NonFiniteGuard
from shoal.train.metrics.meter import Meter, finite
from shoal.train.optimizer import (
    LossScale,
    clip_and_update,
    learning_rate,
    set_learning_rate,
    squared_norm,
)
from shoal.train.outcome import RESUMED, Outcome
from shoal.train.program import blueprint, reduce_dtype
from shoal.train.run_directory import RunDirectory, identity
from shoal.train.server.items import WorkQueue
from shoal.train.state import State
from shoal.train.step import StepResult

# Keys of an attempt's store: which incarnation of a worker has joined; which one the first server has lost; the step
# after which servers stop.
JOINED, LOST, STOP_AT = "worker-{}", "lost-worker-{}", "server-stop-at"
# Pause between two polls of the store, for workers and for a request to stop.
LOOK_SECONDS = 0.02
# A starting worker may import and compile for this long before its first message.
START_SECONDS = 120.0
# Time for the workers to learn that training is over.
END_SECONDS = 5.0


@dataclass(eq=False)
class Push:
    """A pushed gradient of the mean loss over a part's targets."""

    worker: int
    item: int
    gradient: Tensor
    targets: int
    loss: float
    norm: float  # over all servers' ranges
    pulled: int  # updates made before the weights it was computed with


def link_name(worker: int, incarnation: int, server: int) -> str:
    return f"link-{worker}-{incarnation}-{server}"


def serve(
    job: Job,
    servers: Job,
    run: RunDirectory,
    dataset: Path,
    mesh: Mesh,
    wants_stop: Callable[[], bool],
    announce: Announce = no_announce,
    attempt: str = "0",
    restarts: int = 0,
    guest: object = None,
    set_aside: Sequence[int] = (),
) -> Outcome:
    """Like ``train.loop.train``, for a server rank: ``job`` is the workers' job, ``servers`` its own."""
    server = ParameterServer(job, run, dataset, mesh, wants_stop, announce, attempt, set_aside)
    if mesh.rank == 0:
        assert mesh.hosts.store is not None
        mesh.hosts.store.set(RESUMED, str(server.done))
        if restarts:
            run.note_fault(kind="restart", attempt=restarts, resumed_step=server.done)
    return server.run_to_end()


class ParameterServer:
    """``changed`` guards everything that threads share, and is notified of every change a thread may wait for."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        dataset: Path,
        mesh: Mesh,
        wants_stop: Callable[[], bool],
        announce: Announce,
        attempt: str,
        set_aside: Sequence[int],
    ) -> None:
        config, self.recipe = job.config, job.config.recipe
        self.job, self.run, self.mesh, self.announce = job, run, mesh, announce
        self.wants_stop = wants_stop
        self.workers, self.bound = job.layout.world, config.server.staleness
        self.sync = config.server.mode == "sync"
        self.served = ServedParameters(blueprint(job.model, self.recipe), mesh, self.recipe.seq, mesh.device)
        self.reduce = reduce_dtype(self.recipe) or self.served.flat.dtype
        self.optimizer = optimizers.build(self.served.pieces, self.recipe)
        scale = LossScale()
        self.state = State(job.model, self.served, self.optimizer, self.recipe, scale, mesh)
        origin = identity(job, Collection.open(dataset).fingerprint)
        self.commits = Commits(
            self.state, run, mesh, config.checkpoint, self.recipe.clock, origin, attempt, set_aside
        )
        announce(RESTORE, 0)
        self.done = self.commits.restore()
        if not self.done:
            self.served.fill(first_weights(job))
        self.attempt = attempt
        self.changed = threading.Condition()
        self.over = False
        self.trouble: BaseException | None = None  # error of a thread: the main thread raises it
        self.stop_at: int | None = None
        self.applied = self.done * self.workers  # pushes used by updates so far
        self.waiting: dict[int, Push] = {}  # by item
        # Items that were pushed: all below the floor, which the last pause set, and these.
        self.floor = self.applied
        self.taken: set[int] = set()
        self.present: set[int] = set()  # workers that have not been told to end
        self.has_pushed: set[int] = set()  # workers that have finished importing and compiling
        self.timeout = timedelta(seconds=config.fault.timeout)
        self.to_start = max(self.timeout, timedelta(seconds=START_SECONDS))
        self.pulled: dict[
            int, int
        ] = {}  # async: per worker, updates made before the weights it computes with
        self.work = WorkQueue(self.applied)
        self.results: dict[int, tuple[float, int]] = {}  # results of an evaluation, by part
        self.meter = Meter(job, mesh)
        self.guard = NonFiniteGuard(config.fault.nonfinite, scaled=False)
        if mesh.rank == 0:
            self.metrics = StepFile(run.metrics, self.done)
            StepFile(run.samples, self.done)  # a worker appends to it
            self.commits.before_commit = self.metrics.sync

    # The main thread: updates and commits.

    def run_to_end(self) -> Outcome:
        for worker in range(self.workers):
            threading.Thread(target=self._attend, args=(worker,), daemon=True).start()
        self._hand_out()
        self.meter.start()
        while self.done < self.recipe.steps and self._step(self.done + 1):
            self.meter.start()
        stopped = self.done < self.recipe.steps
        self.announce(COMMIT, self.done)
        self.commits.finish(self.done, stopped)
        if self.mesh.rank == 0:
            self.metrics.sync()
        self._end()
        return Outcome(stopped, self.done)

    def _step(self, step: int) -> bool:
        """Update with all of a step's parts or, asynchronously, with as many pushes as a step has. False: asked to
        stop before it.
        """
        self.announce(STEP, step)
        with self.changed:
            self._look_for_stop()
        pushes = self._synchronous(step) if self.sync else self._asynchronous(step)
        if pushes is None:
            return False
        self.meter.stop()
        last = step == self.recipe.steps
        result = self._result(step, pushes)
        # A pushed gradient cannot be recomputed, so the policy ``retry`` stops.
        self.guard.judge(step, result, lambda: result)
        row = self._row(step, pushes, result)
        if self._evaluates(step):
            row["heldout_loss"] = finite(self._heldout(step))
        if self.mesh.rank == 0:
            self.metrics.append(row)
            if (told := self.guard.told(step, result)) is not None:
                self.run.note_fault(**told)
        self.announce(COMMIT, step)
        self.commits.hear()
        self.commits.after_step(step, last, row.get("heldout_loss"))
        self._hand_out()
        return True

    def _synchronous(self, step: int) -> list[Push] | None:
        items = range(item_of(step, 0, self.workers), item_of(step + 1, 0, self.workers))
        if not self._await(lambda: all(item in self.waiting for item in items)):
            return None
        self.meter.have_input()
        with self.changed:
            pushes = [self.waiting.pop(item) for item in items]
            total = max(1, sum(push.targets for push in pushes))
            self.served.gradient.zero_()
            for push in pushes:
                # In the order of parts, not of arrival: sums are the same in every run.
                share = push.targets / total
                self.served.gradient.add_(push.gradient.to(self.served.flat.dtype), alpha=share)
            squares = squared_norm(self.served.pieces, self.mesh.device)
        (squares_of_all,) = self.mesh.hosts.sum_floats([float(squares)])
        self.norm = math.sqrt(squares_of_all)
        with self.changed:
            self._update(learning_rate(self.recipe, step), self.norm, step)
            self.applied += self.workers
            self._finish(step)
        return pushes

    def _asynchronous(self, step: int) -> list[Push] | None:
        pushes: list[Push] = []
        rate = learning_rate(self.recipe, step) / self.workers
        while self.applied < step * self.workers:
            if not self._await(lambda: self._ripe() is not None):
                return None
            self.meter.have_input()
            with self.changed:
                push = self._ripe()
                assert push is not None
                del self.waiting[push.item]
                self.served.gradient.copy_(push.gradient)
                self._update(rate, push.norm, self.applied + 1)
                push.pulled = self.applied - push.pulled  # from now on its staleness
                self.applied += 1
                self.pulled.pop(push.worker, None)
                pushes.append(push)
                self.changed.notify_all()
        self.norm = math.sqrt(sum(push.norm**2 for push in pushes) / len(pushes))
        with self.changed:
            self._finish(step)
        return pushes

    def _ripe(self) -> Push | None:
        """The oldest waiting push, unless updating with it would make an older, still running gradient too stale.

        Number the gradients that are being computed or waiting, oldest first: 0, 1, …. Applied in this order, the one
        at place i is applied after i updates, which keeps all within their bounds; so does a pull, which takes the last
        place (``_weights``). A push that overtakes others delays each of these by one update.
        """
        push = min(self.waiting.values(), key=lambda one: (one.pulled, one.item), default=None)
        if push is None:
            return None
        older = sorted(since for since in self.pulled.values() if since < push.pulled)
        late = (self.applied + 1 + place - since > self.bound for place, since in enumerate(older))
        return None if any(late) else push

    def _update(self, rate: float, norm: float, number: int) -> None:
        self.commits.hold_update()
        set_learning_rate(self.optimizer, rate)
        measured = torch.tensor(norm, dtype=torch.float64)
        clip_and_update(self.optimizer, self.served.pieces, measured, self.recipe.clip, math.inf, number)

    def _finish(self, step: int) -> None:
        self.done = step
        if self._pauses(step):
            self.floor = step * self.workers
            self.taken.clear()
        self.changed.notify_all()

    def _result(self, step: int, pushes: list[Push]) -> StepResult:
        targets = sum(push.targets for push in pushes)
        loss = sum(push.loss * push.targets for push in pushes) / max(1, targets)
        blamed = {push.worker for push in pushes if not math.isfinite(push.norm)}
        rate = learning_rate(self.recipe, step)
        return StepResult(loss, self.norm, rate, math.isfinite(self.norm), tuple(sorted(blamed)))

    def _row(self, step: int, pushes: list[Push], result: StepResult) -> dict[str, Any]:
        targets = sum(push.targets for push in pushes)
        row = self.meter.row(step, result, targets, self.meter.waited)
        row |= {"world": self.workers, "attempt": self.attempt}
        row["workers"] = [push.worker for push in pushes]
        row["staleness"] = [0 if self.sync else push.pulled for push in pushes]
        row["commit_wait_s"] = self.commits.take_waited()
        return row

    # Pauses: at a commit and at an evaluation, everything that was handed out is done, and nothing else.

    def _evaluates(self, step: int) -> bool:
        return evaluates_after(step, self.recipe.steps, self.job.config.evaluate)

    def _pauses(self, step: int) -> bool:
        last = step == self.recipe.steps
        return self.sync or self._evaluates(step) or self.commits.keeps(step, last)

    def _hand_out(self) -> None:
        """Hand out all work up to the next pause."""
        with self.changed:
            step = self.done + 1
            while step < self.recipe.steps and not self._pauses(step):
                step += 1
            limit = min(step, self.recipe.steps, self.recipe.steps if self.stop_at is None else self.stop_at)
            self.work.limit = max(self.work.limit, limit * self.workers)
            self.changed.notify_all()

    def _heldout(self, step: int) -> float | None:
        """Evaluate, on the first server. The others poll for its end, because a commit's collectives would time out
        first.

        They must poll: a thread that blocks on a key would block the server's connection to the store for all threads,
        and so keep a worker from rejoining, which may be what the first server waits for.
        """
        store = self.mesh.hosts.store
        assert store is not None
        evaluated = self.mesh.hosts.new_key("evaluated")
        self.announce(EVALUATE, step)
        if self.mesh.rank != 0:
            while store.read(evaluated) is None:
                if self.trouble is not None:
                    raise self.trouble
                time.sleep(LOOK_SECONDS)
            return None
        with self.changed:
            self.results.clear()
            self.work.evaluate(range(self.workers))
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.trouble is not None or len(self.results) == self.workers)
            if self.trouble is not None:
                raise self.trouble
            loss = sum(one for one, _ in self.results.values())
            targets = sum(one for _, one in self.results.values())
        store.set(evaluated, str(step))
        return loss / targets if targets else None

    # Stopping.

    def _await(self, ready: Callable[[], bool]) -> bool:
        """Wait until ``ready``; False if the servers have agreed to stop after the current step."""
        with self.changed:
            while not ready():
                if self.trouble is not None:
                    raise self.trouble
                self._look_for_stop()
                if self.stop_at is not None and self.done >= self.stop_at:
                    return False
                self.changed.wait(LOOK_SECONDS)
        return True

    def _look_for_stop(self) -> None:
        """The first server decides the last step: everything it has handed out is finished."""
        store = self.mesh.hosts.store
        assert store is not None
        if self.stop_at is not None:
            return
        if self.mesh.rank != 0:
            told = store.read(STOP_AT)
            self.stop_at = None if told is None else int(told)
        elif self.wants_stop():
            self.stop_at = max(self.done, -(-self.work.next // self.workers))
            self.work.limit = self.stop_at * self.workers
            store.set(STOP_AT, str(self.stop_at))
            self.changed.notify_all()

    def _end(self) -> None:
        with self.changed:
            self.work.ended = True
            self.changed.notify_all()
            if self.mesh.rank == 0:
                self.changed.wait_for(lambda: not self.present, END_SECONDS)
            self.over = True
            self.changed.notify_all()
        if self.mesh.rank == 0:
            time.sleep(LOOK_SECONDS)  # let pending messages leave

    # Threads: one per worker, across its incarnations.

    def _attend(self, worker: int) -> None:
        try:
            self._attend_all(worker)
        except BaseException as error:  # an unattended worker would wait for hours
            with self.changed:
                self.trouble = error
                self.changed.notify_all()

    def _attend_all(self, worker: int) -> None:
        store = self.mesh.hosts.store
        assert store is not None
        # A thread that waits for a key blocks the connection for all others.
        plain: Any = store.plain
        own = plain.clone()
        last = 0
        while not self.over:
            came = int(store.read(JOINED.format(worker)) or 0)
            if came <= last:
                time.sleep(LOOK_SECONDS)
                continue
            last = came
            try:
                link = ServerLink(own, link_name(worker, came, self.mesh.rank), wire.SERVER, self.to_start)
                self.present.add(worker)
                while self._answer(worker, link):
                    pass
                self._told_to_end(worker)
            except LinkLost:
                self._lost(worker)
                if self.mesh.rank == 0:
                    # The launcher makes sure that it is gone: a hanging worker would block other servers' links.
                    store.set(LOST.format(worker), str(came))

    def _told_to_end(self, worker: int) -> None:
        with self.changed:
            self.present.discard(worker)
            self.changed.notify_all()

    def _lost(self, worker: int) -> None:
        with self.changed:
            self.present.discard(worker)
            self.has_pushed.discard(worker)
            self.work.lost(worker)
            if all(push.worker != worker for push in self.waiting.values()):
                self.pulled.pop(worker, None)
            self.changed.notify_all()

    def _answer(self, worker: int, link: ServerLink) -> bool:
        """Answer one request. False: it was the last."""
        kind, number, targets, loss, norm, need = link.hear(self._patience(worker))
        item = int(number)
        if kind == wire.PUSH:
            gradient = link.receive(torch.empty(self.served.flat.numel(), dtype=self.reduce))
            with self.changed:
                self._take(Push(worker, item, gradient, int(targets), loss, norm, self.pulled.get(worker, 0)))
            link.tell(1)
        elif kind == wire.PULL:
            link.send(self._weights(worker, item, int(need)))
        elif kind == wire.RESULT:
            with self.changed:
                self.results[item] = (loss, int(targets))
                self.work.done(worker)
                self.changed.notify_all()
            link.tell(1)
        else:
            told, number = self._next(worker)
            link.tell(told, number, self.done)
            return told != wire.END
        return True

    def _patience(self, worker: int) -> timedelta:
        """How long a worker may compute. Only the first server can tell computing from waiting for work.

        An evaluation has no limit.
        """
        held = self.work.held.get(worker)
        if self.mesh.rank != 0 or (held is not None and held.kind == wire.EVALUATE):
            return PATIENCE
        return self.timeout if worker in self.has_pushed else self.to_start

    def _take(self, push: Push) -> None:
        """Accept a push, unless its item was pushed before by a worker that was lost halfway."""
        self.work.done(push.worker)
        self.has_pushed.add(push.worker)
        if push.item in self.taken or push.item < self.floor:
            self.pulled.pop(push.worker, None)
        else:
            self.taken.add(push.item)
            self.waiting[push.item] = push
        self.changed.notify_all()

    def _weights(self, worker: int, item: int, need: int) -> Tensor:
        """The weights, once ``need`` steps are done; asynchronously, also once the worker's own push is applied and few
        enough others are computing.

        ``item`` below 0: the weights are not for training.
        """
        with self.changed:
            trains = item >= 0 and not self.sync

            def ready() -> bool:
                own = any(push.worker == worker for push in self.waiting.values())
                full = len(self.pulled) > self.bound
                return self.over or (self.done >= need and not (trains and (own or full)))

            self.changed.wait_for(ready)
            if trains:
                self.pulled[worker] = self.applied
            return self.served.flat.detach().clone()

    def _next(self, worker: int) -> tuple[int, int]:
        with self.changed:
            while (item := self.work.take(worker)) is None:
                self.changed.wait()
            return item.kind, item.number
