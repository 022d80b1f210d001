"""Save a checkpoint: every rank stages its share, a thread writes it, the first rank commits.

Training waits only for the copy. If a save fails, because the disk is full or a server does not respond, existing
commits stay untouched, and the failure is reported on request.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from blake3 import blake3

from shoal.parallel.gathered_texts import gather_texts
from shoal.parallel.hosts import PATIENCE
from shoal.parallel.mesh import Mesh
from shoal.train.checkpoint.manifest import ListedPart, Manifest, PartRun, StoredPiece
from shoal.train.checkpoint.parts import (
    Coverage,
    coverage,
    coverage_from_json,
    in_parts,
    index_of,
    list_name,
    list_text,
    listed_apart,
    part_of,
)
from shoal.train.checkpoint.peer_memory import Peers, file_of
from shoal.train.checkpoint.staging import StagingBuffer, States
from shoal.train.checkpoint.storage import CheckpointStorage
from shoal.train.files import in_words

# Written in parts of this size: while the disk takes one, the next is copied into the page cache.
CHUNK = 1 << 22
# Hashing threads per rank.
HASHERS = 2
# The nice(1) value of background writes, relative to training.
NICE = 5


@dataclass(frozen=True)
class Saved:
    """The result of one save. ``error``: why there is no commit; the last one before it is untouched."""

    place: CheckpointStorage
    step: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Written:
    """What a rank has written: its pieces, or the list that contains them; or why it failed."""

    pieces: tuple[StoredPiece, ...] = ()
    part: ListedPart | None = None
    covered: Coverage | None = None  # boxes that the list covers; None: unchanged
    states: tuple[str, ...] = ()
    error: str = ""

    def to_text(self) -> str:
        pieces = [piece.model_dump() for piece in self.pieces]
        part = None if self.part is None else self.part.model_dump()
        return json.dumps([pieces, part, self.covered, self.states, self.error])

    @classmethod
    def from_text(cls, text: str) -> Written:
        pieces, part, covered, states, error = json.loads(text)
        return cls(
            tuple(map(StoredPiece.model_validate, pieces)),
            None if part is None else ListedPart.model_validate(part),
            None if covered is None else coverage_from_json(covered),
            tuple(states),
            error,
        )


class Saver:
    """Saves one rank's share to one place. All ranks must call the same methods in the same order."""

    def __init__(
        self,
        name: str,
        place: CheckpointStorage,
        stage: StagingBuffer,
        mesh: Mesh,
        attempt: str,
        prepare: Callable[[], None] = lambda: None,
        after_commit: Callable[[], None] = lambda: None,
        peers: Peers | None = None,
    ) -> None:
        """``name`` tells a rank's savers apart; ``attempt`` tells its files from those of a dead attempt.

        ``prepare`` is called on every rank and ``after_commit`` on the first, in the background. ``peers``: other nodes
        with their own place, and copies in it.
        """
        self.name, self.place, self.stage, self.attempt = name, place, stage, attempt
        self.rank, self.world = mesh.rank, mesh.world
        self.prepare, self.after_commit, self.peers = prepare, after_commit, peers
        self.store = mesh.hosts.store if mesh.world > 1 else None
        self._number = 0  # number of saves: the same step may be saved twice
        self.file = file_of(mesh.rank)
        self.waited = 0.0  # seconds that training waited; the reader resets it
        self._writer = ThreadPoolExecutor(1, "shoal-save", _be_nice)
        self._hashers = ThreadPoolExecutor(HASHERS, "shoal-hash", _be_nice)
        self._covered: Coverage | None = None  # coverage that was sent last
        self._coverages: dict[
            int, Coverage
        ] = {}  # on the first rank: of all ranks that list their own pieces
        self._index: dict[str, dict[str, tuple[PartRun, ...]]] = {}
        self._indexed: list[int] = []  # ranks whose coverage is in it
        self._running: Future[Saved] | None = None
        self._done: list[Saved] = []

    def start(self, manifest: Manifest, states: States) -> None:
        """Start saving these states under ``manifest``, which has no pieces yet."""
        began = time.perf_counter()
        self._wait()
        self.stage.fill(states)
        self._running = self._writer.submit(self._save, manifest)
        self.waited += time.perf_counter() - began

    def finish(self) -> None:
        """Wait until everything that was started is committed, or has failed."""
        began = time.perf_counter()
        self._wait()
        self.waited += time.perf_counter() - began

    def take_results(self) -> list[Saved]:
        """Results of saves since the last call. Only the first rank knows whether there was a commit."""
        if self._running is not None and self._running.done():
            self._wait()
        results, self._done = self._done, []
        return results

    def close(self) -> None:
        self._wait()
        self._writer.shutdown()
        self._hashers.shutdown()

    def _wait(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            self._done.append(running.result())

    # In the background.

    def _save(self, manifest: Manifest) -> Saved:
        began = time.monotonic()
        self._number += 1
        written = Written()
        try:
            self.prepare()
            self.place.remove_share([self.file, list_name(self.file)])
            written = self._listed(manifest.step, self._write(manifest.step))
        except OSError as trouble:
            written = Written(error=in_words(trouble))
        if (copying := self._copy(manifest.step)) and not written.error:
            written = replace(written, error=copying)
        every = self._gather(manifest.step, written)
        if self.rank == 0:
            error = self._conclude(manifest, every)
        else:
            error = written.error
            self._commit_copies(manifest.step)
        return Saved(self.place, manifest.step, time.monotonic() - began, error)

    def _write(self, step: int) -> list[StoredPiece]:
        content, lots = self.stage.content(), self.stage.lots
        hashes = self._hashers.map(
            lambda lot: blake3(content[lot.position : lot.position + lot.bytes]).hexdigest(), lots
        )
        # Other threads hash it meanwhile.
        file = self.place.write(step, self.attempt, self.file, _chunks(content))
        return [lot.entry(file, found) for lot, found in zip(lots, hashes, strict=True)]

    def _copy(self, step: int) -> str:
        """Copy to another node, even if writing here failed, because others wait for it. Returns what went wrong, in
        words.
        """
        try:
            if self.peers is not None:
                self.peers.copy(step, self.stage.content())
        except OSError as trouble:
            return in_words(trouble)
        except RuntimeError as trouble:  # torch's error for a lost peer
            return f"no copy on another node: {trouble}"
        return ""

    def _listed(self, step: int, pieces: list[StoredPiece]) -> Written:
        """Put many pieces into a separate list; send their coverage only when it changes, which is rare."""
        if self.peers is not None or not pieces or not listed_apart(len(pieces), self.world):
            return Written(tuple(pieces))
        text = list_text(pieces)
        name = self.place.write(step, self.attempt, list_name(self.file), [memoryview(text.encode())])
        covered = coverage(pieces)
        states = tuple(sorted({piece.state for piece in pieces}))
        told = Written((), part_of(name, text, pieces), None if covered == self._covered else covered, states)
        self._covered = covered
        return told

    def _gather(self, step: int, written: Written) -> list[Written]:
        """On the first rank: the results of all ranks."""
        every = [written]
        if self.store is not None:
            series, key = f"save-{self.name}", self._key(step, "told")
            told = gather_texts(self.store, self.rank, self.world, key, written.to_text(), PATIENCE, series)
            every += map(Written.from_text, told[1:])
        for rank, one in enumerate(every):
            if one.covered is not None:
                self._coverages[rank], self._indexed = one.covered, []
        return every

    def _commit_copies(self, step: int) -> None:
        leads = self.peers is not None and self.peers.leads and self.peers.node > 0
        if not leads or self.peers is None or self.store is None:
            return
        if self.peers.commit_here(self.store, self._key(step), step):
            self.after_commit()

    def _conclude(self, manifest: Manifest, every: list[Written]) -> str:
        """Commit if every rank succeeded."""
        failed = next(((rank, one.error) for rank, one in enumerate(every) if one.error), None)
        error = "" if failed is None else f"rank {failed[0]}: {failed[1]}" if failed[0] else failed[1]
        complete = "" if error else self._complete(manifest, every).to_text()
        if self.peers is not None:
            assert self.store is not None
            elsewhere = self.peers.commit_elsewhere(self.store, self._key(manifest.step), complete)
            error = error or elsewhere
        try:
            if not error:
                self.place.commit(manifest.step, self.attempt, complete)
        except OSError as trouble:
            error = in_words(trouble)
        if error:
            with contextlib.suppress(OSError):
                self.place.abandon(manifest.step, self.attempt)
        else:
            self.after_commit()
            with contextlib.suppress(OSError):
                self.place.remove_rest()
        return error

    def _complete(self, manifest: Manifest, every: list[Written]) -> Manifest:
        pieces = tuple(piece for one in every for piece in one.pieces)
        manifest = manifest.model_copy(update={"pieces": pieces})
        apart = {rank: one for rank, one in enumerate(every) if one.part is not None}
        if not apart:
            return manifest
        if self._indexed != [*apart]:
            self._index, self._indexed = index_of([self._coverages[rank] for rank in apart]), [*apart]
        states = {state for one in apart.values() for state in one.states}
        return in_parts(manifest, [one.part for one in apart.values() if one.part], self._index, states)

    def _key(self, step: int, rank: int | str = "commit") -> str:
        return f"save-{self.name}-{self._number}-{step}-{rank}"


def _chunks(content: memoryview) -> Iterator[memoryview]:
    for start in range(0, content.nbytes, CHUNK):
        yield content[start : start + CHUNK]


def _be_nice() -> None:
    """On Linux threads have their own niceness; elsewhere it would apply to the whole process."""
    if os.uname().sysname == "Linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
