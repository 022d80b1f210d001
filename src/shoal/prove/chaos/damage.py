"""Damage the newest checkpoint as disks, people and crashes do; never the last intact copy."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.train.checkpoint.manifest import NAME, Damaged
from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.storage import CheckpointStorage, DirectoryStorage, step_name
from shoal.train.run_directory import RunDirectory

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# How often memory is lost and the disk's copy is damaged as well, if both have the newest step.
BOTH = 0.3


@dataclass(frozen=True)
class Copy:
    """A checkpoint at one of its places."""

    place: CheckpointStorage
    step: int

    @property
    def sound(self) -> bool:
        """Whether it is intact. Reads every byte: only an intact checkpoint counts as a fallback."""
        try:
            return not Checkpoint(self.place, self.step, threads=1).damages()
        except (Damaged, OSError):
            return False


def damage(run: RunDirectory, kind: str, numbers: random.Random) -> int | None:
    """Damage the newest copy in memory; or, if the disk has it too, the one on disk, and lose memory as well.

    What is damaged, if anything, depends on what exists at this moment: an intact copy to resume from always remains.
    Returns how many committed steps are lost for good; None if nothing could be damaged.
    """
    disk, root = run.disk, run.memory().path.parent
    # Several nodes have several copies.
    memories = [DirectoryStorage(path) for path in sorted(root.iterdir())] if root.is_dir() else []
    copies = [Copy(place, step) for place in (*memories, disk) for step in place.committed()]
    newest = max((copy.step for copy in copies), default=0)
    in_memory = [copy for copy in copies if copy.place != disk and copy.step == newest]
    on_disk = [copy for copy in copies if copy.place == disk and copy.step == newest]
    # Of equally new copies the run would resume from the one in memory.
    choices = [struck for struck in (in_memory, on_disk) if struck]
    if len(choices) == 2 and numbers.random() < BOTH:
        choices.reverse()
    for struck in choices:
        loses_memory = struck is on_disk and bool(in_memory)
        left = [copy for copy in copies if copy not in struck and not (loses_memory and copy.place != disk)]
        refuge = next((copy for copy in _newest_first(left) if copy.sound), None)
        if refuge is None:
            continue
        other = next((copy for copy in _newest_first(left) if copy.step != newest), None)
        if kind == "swapped files" and other is None and any(len(_files(copy)) == 1 for copy in struck):
            continue
        if loses_memory:
            shutil.rmtree(root, ignore_errors=True)
        seed = numbers.getrandbits(32)
        for copy in struck:
            _carry_out(kind, copy, random.Random(seed), other)
        return newest - refuge.step
    return None


def _newest_first(copies: Iterable[Copy]) -> list[Copy]:
    return sorted(copies, key=lambda copy: copy.step, reverse=True)


def _carry_out(kind: str, copy: Copy, numbers: random.Random, other: Copy | None) -> None:
    """``other``: a checkpoint of another step."""
    system, folder = _where(copy)
    path = numbers.choice(_files(copy))
    content = bytearray(system.cat_file(path))
    if kind == "flipped bit":
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
        system.pipe_file(path, bytes(content))
    elif kind == "truncated file":
        system.pipe_file(path, bytes(content[: numbers.randrange(len(content))]))
    elif kind == "missing file":
        system.rm_file(path)
    elif kind == "torn manifest":
        manifest = system.cat_file(f"{folder}/{NAME}")
        system.pipe_file(f"{folder}/{NAME}", manifest[: numbers.randrange(len(manifest))])
    elif kind == "swapped files":
        if others := [found for found in _files(copy) if found != path]:
            second = numbers.choice(others)
            system.pipe_file(path, system.cat_file(second))
            system.pipe_file(second, bytes(content))
        else:
            # On its own, it gets the content of another step, which usually has the same length.
            assert other is not None
            system.pipe_file(path, _where(other)[0].cat_file(_files(other)[0]))


def _files(copy: Copy) -> list[str]:
    system, folder = _where(copy)
    return sorted(path for path in system.ls(folder, detail=False) if path.endswith(".bin"))


def _where(copy: Copy) -> tuple[AbstractFileSystem, str]:
    """A file system, and the checkpoint's path in it."""
    if isinstance(copy.place, ObjectStore):
        return copy.place.files, f"{copy.place.root}/{step_name(copy.step)}"
    assert isinstance(copy.place, DirectoryStorage)
    import fsspec

    return fsspec.filesystem("file"), str(copy.place.at(copy.step))
