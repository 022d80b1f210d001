"""One rank's part in commits: when, where, what to keep, and which one to resume from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shoal.facts.cluster.this_machine import usable_threads
from shoal.facts.config import CheckpointSection
from shoal.facts.sample_clock import SampleClock
from shoal.parallel.mesh import Mesh
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.checkpoint.peer_memory import Peers
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.retention import Keeper, newest_first
from shoal.train.checkpoint.save import Saved, Saver
from shoal.train.checkpoint.storage import CheckpointStorage, Unreachable
from shoal.train.files import MAKE_ROOM, last_row
from shoal.train.run_directory import RunDirectory
from shoal.train.state import State

# Copies in memory: the last one, and the previous one while that is being replaced.
KEPT_IN_MEMORY = 2


class CommitFailed(Exception):
    """The last state could not be committed, and no later one will be tried."""


class Commits:
    """Saves and restores a run's state. All ranks must call the same methods in the same order."""

    def __init__(
        self,
        state: State,
        run: RunDirectory,
        mesh: Mesh,
        config: CheckpointSection,
        clock: SampleClock,
        identity: dict[str, Any],
        attempt: str,
        set_aside: Sequence[int] = (),
    ) -> None:
        """``clock``: the samples of each step. ``attempt``: a name unique among all attempts at this run.

        ``set_aside``: steps in any node's memory that the launcher does not trust.
        """
        self.state, self.run, self.mesh, self.config = state, run, mesh, config
        self.clock, self.identity = clock, identity
        self.disk: CheckpointStorage = run.disk
        self.memory: CheckpointStorage = run.memory()
        self.disk.share_removal(mesh.world)
        self.peers: Peers | None = None  # copies on other nodes, if each node has its own memory
        if mesh.nodes > 1 and config.memory:
            self.peers = Peers(mesh, run.memory(), attempt, set_aside)
        self.committed = 0  # the last step on disk; known on the first rank
        # On the first rank: rows up to a commit must survive whatever the commit survives.
        self.before_commit: Callable[[], None] = lambda: None
        self._last_error = ""
        self._saving = 0  # the step being saved
        self._told: set[str] = set()
        self._aside: list[tuple[int, str, str]] = []  # set aside and not yet reported
        self._keepers = {
            self.disk: Keeper(self.disk, config.keep, config.keep_every, config.keep_best),
            self.memory: Keeper(self.memory, KEPT_IN_MEMORY),
        }
        # One per place, because their paces differ: a disk may take minutes for what memory takes at once.
        self._savers: dict[CheckpointStorage, Saver] = {
            place: Saver(
                name,
                place,
                state.new_stage(often, tell=self._tell),
                mesh,
                attempt,
                lambda: self.before_commit(),
                partial(self._tidy, place),
                peers,
            )
            # A run without commits still makes one when it is asked to stop: memory for that can be found then.
            for name, place, used, often, peers in (
                ("disk", self.disk, True, config.every > 0, None),
                ("memory", self.memory, config.memory > 0, True, self.peers),
            )
            if used
        }

    # Resuming.

    def restore(self) -> int:
        """Restore the newest intact state and return its step; 0 if there is none.

        A damaged state is set aside with the reason, and the newest remaining one is used. Whether a state is intact is
        known only when every rank has read what it needs, so all ranks decide together.
        """
        damaged = ""
        if self.mesh.rank == 0:
            for place in (self.disk, self.memory):
                place.clear()
        if self.peers is not None:
            self.peers.clear()
        while (choice := self._choose()) is not None:
            place, step = choice
            damaged = self._try(place, step)
            if not damaged:
                self.state.settle()
                self.committed = step if place == self.disk else max(self.disk.committed(), default=0)
                if self.mesh.rank == 0:
                    for place in self._keepers:
                        self._tidy(place)
                return step
            if self.mesh.rank == 0:
                self._set_aside(place, step, damaged)
            if self.peers is not None and place == self.memory:
                self.peers.remove(step)
        if damaged:
            raise Damaged(f"no sound checkpoint is left. The last one: {damaged}")
        return 0

    def _choose(self) -> tuple[CheckpointStorage, int] | None:
        """The first rank chooses what all ranks try: others might look while something is being removed."""
        together, useless = self.peers.newest(self._done()) if self.peers is not None else (None, [])
        for step, reason in useless if self.mesh.rank == 0 else []:
            self._set_aside(self.memory, step, reason)
        places = [self.disk] if self.mesh.nodes > 1 else [self.memory, self.disk]
        found = newest_first(places) if self.mesh.rank == 0 else []
        if together is not None and (not found or together.step >= found[0][1]):
            found = [(self.memory, together.step)]
        self._note_set_aside(found)
        text = self.mesh.hosts.broadcast(
            f"{'memory' if found[0][0] == self.memory else 'disk'} {found[0][1]}" if found else ""
        )
        if not text:
            return None
        where, number = text.split()
        if self.peers is not None and together is not None and where == "memory":
            self.peers.bring(together)
        return self.memory if where == "memory" else self.disk, int(number)

    def _done(self) -> int:
        """The last step that has a metrics row: every committed step has one."""
        row = last_row(self.run.metrics)
        return int(row["step"]) if row else 0

    def _try(self, place: CheckpointStorage, step: int) -> str:
        """What is wrong with a checkpoint; empty if all ranks have restored it."""
        trouble = ""
        try:
            threads = max(2, usable_threads() * self.mesh.nodes // self.mesh.world)
            share = (self.mesh.rank, self.mesh.world)
            if place == self.memory and self.mesh.nodes > 1:
                here = self.mesh.world // self.mesh.nodes  # each node has its own copies
                share = (self.mesh.rank % here, here)
            self.state.restore(Checkpoint(place, step, threads, share))
        except Unreachable:
            # A later attempt may find it: nothing is set aside because a server did not answer.
            raise
        except (Damaged, OSError) as error:
            trouble = str(error)
        return self.mesh.hosts.broadcast(next(filter(None, self.mesh.hosts.gather(trouble)), ""))

    def _set_aside(self, place: CheckpointStorage, step: int, reason: str) -> None:
        if place == self.memory:
            if self.peers is None:
                place.remove(step)
            action = "removed from memory"
        else:
            place.set_aside(step, reason)
            action = "set aside"
        self._aside.append((step, action, reason))

    def _note_set_aside(self, left: list[tuple[CheckpointStorage, int]]) -> None:
        """On the first rank, record what was set aside, once it is known what is used instead."""
        instead = "there is no other"
        for place, step in left[:1]:
            instead = f"trying step {step} {'in memory' if place == self.memory else 'on disk'}"
        for step, action, reason in self._aside:
            self.run.note_fault(
                kind="damaged checkpoint", step=step, action=f"{action}, {instead}", message=reason
            )
        self._aside.clear()

    # Committing.

    def due(self, step: int, last: bool) -> bool:
        """Whether a step is committed to disk."""
        every = self.config.every
        return every > 0 and (last or step % every == 0)

    def keeps(self, step: int, last: bool) -> bool:
        """Whether a step's state is copied, to disk or to memory."""
        return self.due(step, last) or self._due_in_memory(step)

    def _due_in_memory(self, step: int) -> bool:
        return self.config.memory > 0 and step % self.config.memory == 0

    def after_step(self, step: int, last: bool, heldout_loss: float | None) -> None:
        """Do what is due after a step. Training waits only for a copy of the state, unless told to wait for more."""
        if self._due_in_memory(step):
            self._start(self.memory, step, heldout_loss)
        if self.due(step, last):
            self._start(self.disk, step, heldout_loss)
            if not self.config.background:
                self._savers[self.disk].finish()
                self.hear()
                self.mesh.hosts.wait_for_first_rank()

    def take_waited(self) -> float:
        """Seconds that training waited for commits since the last call."""
        waited = sum(saver.waited for saver in self._savers.values())
        for saver in self._savers.values():
            saver.waited = 0.0
        return waited

    def hold_update(self) -> None:
        """Call before the weights change: waits for running copies of the state.

        Copies to memory must be complete by then, so a fault costs one step at most, the one in progress.
        """
        for saver in self._savers.values():
            saver.stage.hold_update()
        if self.mesh.rank == 0 and self.memory in self._savers:
            self._savers[self.memory].finish()

    def hear(self) -> None:
        """Collect the results of earlier saves. A failed one is reported, and the next one tries again."""
        for saved in [saved for saver in self._savers.values() for saved in saver.take_results()]:
            if self.mesh.rank != 0:
                continue
            if saved.error:
                self._note_failure(saved)
            elif saved.place == self.disk:
                self.committed = saved.step
                self._note_recovery(saved.step)

    def finish(self, step: int, stopped: bool, heldout_loss: float | None = None) -> None:
        """Finish this process after ``step``. If commits are made, or the run was asked to stop, the state is on disk
        afterwards.

        If the disk refuses it, this is the last chance to say so.
        """
        self._settle()
        if (
            step
            and (stopped or self.config.every)
            and self.mesh.hosts.broadcast(str(self.committed)) != str(step)
        ):
            self._start(self.disk, step, heldout_loss)
            self._settle()
            if self.mesh.rank == 0 and self.committed != step:
                raise CommitFailed(f"{self._last_error}; {MAKE_ROOM}")
            self.mesh.hosts.wait_for_first_rank()
        for saver in self._savers.values():
            saver.close()

    def _settle(self) -> None:
        for saver in self._savers.values():
            saver.finish()
        self.hear()
        self.mesh.hosts.wait_for_first_rank()

    def _start(self, place: CheckpointStorage, step: int, heldout_loss: float | None) -> None:
        self._saving = step
        manifest = self.state.manifest(step, self.clock.before(step + 1), self.identity, heldout_loss)
        self._savers[place].start(manifest, self.state.states())

    def _tell(self, trouble: str) -> None:
        """Report a problem once. The first rank speaks for all: others usually have the same problem, and their own
        log.
        """
        if trouble in self._told:
            return
        self._told.add(trouble)
        if self.mesh.rank == 0:
            self.run.note_fault(kind="staging", step=self._saving, action=trouble)
        else:
            print(trouble, flush=True)

    def _note_failure(self, saved: Saved) -> None:
        """Record a failure once for as long as it stays the same: a disk may be full for a thousand steps."""
        known, self._last_error = self._last_error, saved.error
        if known == saved.error:
            return
        where = "to memory" if saved.place == self.memory else f"after step {saved.step}"
        self.run.note_fault(
            kind="commit failed",
            step=saved.step,
            action=f"no commit {where}: {saved.error}; training goes on, the last commit is step {self.committed}",
        )

    def _note_recovery(self, step: int) -> None:
        if self._last_error:
            self._last_error = ""
            self.run.note_fault(kind="commit", step=step, action="commits succeed again")

    def _tidy(self, place: CheckpointStorage) -> None:
        """After a commit, remove old checkpoints, also in the background: an object store takes its time."""
        with contextlib.suppress(OSError):
            self._keepers[place].tidy()
