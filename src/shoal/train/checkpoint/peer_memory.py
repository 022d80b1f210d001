"""In-memory checkpoints on several nodes: each rank's share on its own node, and a copy on the next.

A lost node takes its memory with it, but what it held is still on the next node. Every node commits the same manifest
in its own memory, the first rank's node last, so what that node has committed exists everywhere. Before a run resumes
from memory, nodes that lack files get them from nodes that have them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3

from shoal.observe.record import BACKGROUND
from shoal.parallel.hosts import PATIENCE
from shoal.parallel.mesh import Mesh
from shoal.parallel.signed_store import SignedStore
from shoal.train.checkpoint.manifest import LARGEST_FILE, NAME, Damaged, is_file_name, parse_manifest
from shoal.train.checkpoint.storage import LAST_STEP, DirectoryStorage, check_file
from shoal.train.files import in_words

# What a node has of a step: the manifest's hash, the sizes of all files it holds, and problems with files that are
# missing or wrong.
Held = tuple[int, str, dict[str, int], dict[str, str]]
Missing = tuple[str, int, int, int]

# Sent in parts of this size: one is written while the next is in flight.
CHUNK = 1 << 26


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


@dataclass(frozen=True)
class IntactCheckpoint:
    """A checkpoint of which every file is on some node. ``missing``: a file, its size, which node has it, and which
    nodes lack it.
    """

    step: int
    manifest: str  # its hash: a step may be done twice, and files of both must not be mixed
    missing: list[Missing]


class Peers:
    """One rank's part. All ranks must call the same methods in the same order."""

    def __init__(
        self, mesh: Mesh, place: DirectoryStorage, attempt: str, set_aside: Sequence[int] = ()
    ) -> None:
        """``set_aside``: steps that the launcher does not trust, of which each node has copies."""
        self.mesh, self.place, self.attempt, self.set_aside = mesh, place, attempt, set_aside
        self.here = mesh.world // mesh.nodes
        self.node, local_rank = divmod(mesh.rank, self.here)
        self.leads = local_rank == 0  # the first rank of its node
        self._links: dict[int, dist.ProcessGroup] = {}
        self._made: set[tuple[int, ...]] = set()
        nodes, here = mesh.nodes, self.here
        # Connect every second pair of the ring first; otherwise each node would wait for the one before it.
        ring = sorted(range(nodes if nodes > 2 else 1), key=lambda node: node % 2)
        self._link(
            (node * here + local, (node + 1) % nodes * here + local) for node in ring for local in range(here)
        )

    def _link(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect pairs of ranks, the same on every rank: one group of all would connect each to every other.

        All ranks go through all pairs and connect only their own, in an order that cannot deadlock.
        """
        for pair in dict.fromkeys(tuple(sorted(pair)) for pair in pairs):
            if pair in self._made:
                continue
            self._made.add(pair)
            group = dist.new_group([*pair], backend="gloo", timeout=PATIENCE, group_desc=BACKGROUND)
            if self.mesh.rank in pair:
                assert isinstance(group, dist.ProcessGroup)
                self._links[sum(pair) - self.mesh.rank] = group

    def _send(self, part: torch.Tensor, to: int) -> dist.Work:
        return self._links[to].send([part], int(to > self.mesh.rank), 0)

    def _take(self, into: torch.Tensor, origin: int) -> dist.Work:
        return self._links[origin].recv([into], int(origin > self.mesh.rank), 0)

    # Saving, in the background.

    def copy(self, step: int, content: memoryview) -> None:
        """Send this rank's share to the next node, and write the share that arrives from the previous one."""
        world, here = self.mesh.world, self.here
        to, origin = (self.mesh.rank + here) % world, (self.mesh.rank - here) % world
        parts = self._exchange(content, to, origin)
        try:
            self.place.write(step, self.attempt, file_of(origin), parts)
        except OSError:
            # Receive the remaining parts even after an error.
            for _ in parts:
                pass
            raise

    def _exchange(self, content: memoryview, to: int, origin: int) -> Iterator[memoryview]:
        mine, theirs = torch.tensor([content.nbytes]), torch.empty(1, dtype=torch.int64)
        self._send_and_receive(mine, to, theirs, origin)
        ours = (
            torch.frombuffer(content, dtype=torch.uint8)
            if content.nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        size = int(theirs)
        if not 0 <= size <= LARGEST_FILE:
            raise RuntimeError(f"rank {origin} says that its share has {size} bytes")
        for start in range(0, max(content.nbytes, size), CHUNK):
            part = ours[start : start + CHUNK]
            into = torch.empty(min(CHUNK, max(0, size - start)), dtype=torch.uint8)
            self._send_and_receive(part, to, into, origin)
            if into.numel():
                yield into.numpy().data

    def _send_and_receive(self, part: torch.Tensor, to: int, into: torch.Tensor, origin: int) -> None:
        works = [self._send(part, to)] if part.numel() else []
        works += [self._take(into, origin)] if into.numel() else []
        for work in works:
            work.wait()

    def commit_elsewhere(self, store: SignedStore, key: str, manifest: str) -> str:
        """On the first rank: make every other node commit, or discard if there is no manifest. Returns what went
        wrong.
        """
        store.set(key, manifest, series="commits")
        failed = store.wait_for([f"{key}-{node}" for node in range(1, self.mesh.nodes)], PATIENCE)
        return next(filter(None, failed), "")

    def commit_here(self, store: SignedStore, key: str, step: int) -> bool:
        """On the first rank of another node: commit when told to. Returns whether there was something to commit."""
        manifest, trouble = store.wait(key, PATIENCE), ""
        try:
            if manifest:
                self.place.commit(step, self.attempt, manifest)
        except OSError as error:
            trouble = f"rank {self.mesh.rank}: {in_words(error)}"
        if trouble or not manifest:
            self.place.abandon(step, self.attempt)
        store.set(f"{key}-{self.node}", trouble, series="committed")
        return bool(manifest) and not trouble

    # Resuming.

    def newest(self, done: int) -> tuple[IntactCheckpoint | None, list[tuple[int, str]]]:
        """The newest checkpoint that is complete across all nodes; and later, unusable ones, with reasons.

        Returns the same on every rank, and removes what is unusable. ``done``, on the first rank: the last step the run
        knows of. A node that was away may have later steps, which the others have rolled back.
        """
        done = int(self.mesh.hosts.broadcast(str(done)))
        for step in self.place.committed() if self.leads else []:
            if step > done or step in self.set_aside:
                self.place.remove(step)
        every = self.mesh.hosts.gather(json.dumps(self._held()) if self.leads else "")
        found = _newest([json.loads(text) for text in every[:: self.here]]) if every else None
        best, useless = _checked(json.loads(self.mesh.hosts.broadcast(json.dumps(found))), self.mesh.nodes)
        for step, _ in useless:
            self.remove(step)
        return best, useless

    def _held(self) -> list[Held]:
        """What is in this node's memory."""
        found: list[Held] = []
        for step in self.place.committed():
            try:
                content = self.place.read_manifest(step)
                sizes = parse_manifest(content, f"{self.place.name(step)}/{NAME}").file_sizes()
            except Damaged as error:
                found.append((step, "", {NAME: 0}, {NAME: str(error)}))
                continue
            wrong = {file: self._wrong(step, file, size) for file, size in sizes.items()}
            lacking = {file: reason for file, reason in wrong.items() if reason}
            found.append((step, blake3(content).hexdigest(), {**sizes, NAME: len(content)}, lacking))
        return found

    def _wrong(self, step: int, file: str, size: int) -> str:
        try:
            check_file(self.place, step, file, size)
        except Damaged as error:
            return str(error)
        return ""

    def bring(self, sound: IntactCheckpoint) -> None:
        """Copy every file of a checkpoint to every node."""
        self._link((origin * self.here, to * self.here) for _, _, origin, to in sound.missing)
        lacking = {to for _, _, _, to in sound.missing}
        if self.leads and self.node in lacking:
            self._make_place(sound)
        for file, size, origin, to in sound.missing:
            if self.leads and self.node == origin:
                for part in self._read(sound.step, file, size):
                    self._send(part, to * self.here).wait()
            if self.leads and self.node == to:
                self.place.write(sound.step, self.attempt, file, self._receive(size, origin * self.here))
        if self.leads and self.node in lacking:
            aside, here = self.place.aside(sound.step, self.attempt), self.place.at(sound.step)
            manifest = aside / NAME if (aside / NAME).exists() else here / NAME
            self.place.commit(sound.step, self.attempt, manifest.read_text(encoding="utf-8"))
        # Other ranks of the node read it too. It may take long, so not a collective, which would time out.
        self.mesh.hosts.gather("")
        self.mesh.hosts.broadcast("")

    def _make_place(self, sound: IntactCheckpoint) -> None:
        """Prepare a directory beside what exists of that step, keeping files of the same checkpoint."""
        aside = self.place.aside(sound.step, self.attempt)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True, mode=0o700)
        lacking = {file for file, _, _, to in sound.missing if to == self.node}
        if self.place.at(sound.step).is_dir():
            for entry in self.place.at(sound.step).iterdir():
                if entry.name not in lacking and entry.name != NAME:
                    os.link(entry, aside / entry.name)

    def _read(self, step: int, file: str, size: int) -> Iterator[torch.Tensor]:
        for start in range(0, size, CHUNK):
            part = torch.empty(min(CHUNK, size - start), dtype=torch.uint8)
            self.place.read(step, file, start, part.numpy().data)
            yield part

    def _receive(self, size: int, origin: int) -> Iterator[memoryview]:
        for start in range(0, size, CHUNK):
            part = torch.empty(min(CHUNK, size - start), dtype=torch.uint8)
            self._take(part, origin).wait()
            yield part.numpy().data

    def remove(self, step: int) -> None:
        """Remove a step from this node's memory."""
        if self.leads and step in self.place.committed():
            self.place.remove(step)

    def clear(self) -> None:
        if self.leads:
            self.place.clear()


def _checked(found: Any, nodes: int) -> tuple[IntactCheckpoint | None, list[tuple[int, str]]]:
    """Validate the first rank's message: it determines paths, and how much is written there."""
    best, useless = found
    if best is not None:
        step, manifest, missing = best
        for file, size, origin, to in missing:
            if not is_file_name(file) and file != NAME:
                raise RuntimeError(f"a checkpoint has no file {file!r}")
            if not _is_count(size, LARGEST_FILE) or not {origin, to} <= set(range(nodes)):
                raise RuntimeError(f"{file} of {size} bytes does not go from node {origin} to node {to}")
        best = IntactCheckpoint(
            _step(step), str(manifest), [(file, size, origin, to) for file, size, origin, to in missing]
        )
    return best, [(_step(step), str(why)) for step, why in useless]


def _step(step: Any) -> int:
    if not _is_count(step, LAST_STEP):
        raise RuntimeError(f"{step!r} is not a step")
    return int(step)


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _newest(
    nodes: list[list[Held]],
) -> tuple[tuple[int, str, list[Missing]] | None, list[tuple[int, str]]]:
    """Choose from what every node holds: for the same step, the version with fewer missing files. Also lists newer,
    incomplete ones.
    """
    best: tuple[int, str, list[Missing]] | None = None
    reasons: dict[int, str] = {}
    kinds = {(step, manifest): sizes for held in nodes for step, manifest, sizes, _ in held}
    for (step, manifest), sizes in kinds.items():
        lacking = [
            next(
                (wrong for one, name, _, wrong in held if (one, name) == (step, manifest)),
                dict.fromkeys(sizes, ""),
            )
            for held in nodes
        ]
        missing = [
            (
                file,
                sizes[file],
                next((node for node, files in enumerate(lacking) if file not in files), -1),
                to,
            )
            for to, files in enumerate(lacking)
            for file in files
        ]
        nowhere = [(file, to) for file, _, origin, to in missing if origin < 0]
        if nowhere:
            told = next(
                filter(None, (lacking[to][file] for file, to in nowhere)), f"{nowhere[0][0]} is on no node"
            )
            reasons.setdefault(step, told)
        elif best is None or (step, -len(missing)) > (best[0], -len(best[2])):
            best = (step, manifest, missing)
    newer = [(step, why) for step, why in sorted(reasons.items()) if best is None or step > best[0]]
    return best, newer
