"""Checkpoint storage in a directory, on disk or in memory: a rename is the commit. Needs no torch."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from shoal.train.checkpoint.manifest import (
    LARGEST_MANIFEST,
    NAME,
    Damaged,
    Manifest,
    is_file_name,
    parse_manifest,
)
from shoal.train.files import replace_text, sync_directory

UNFINISHED = ".unfinished-"
REMOVED = f"{UNFINISHED}removed-"
# Up to so many ranks' files are removed by one of them.
REMOVED_BY_ONE = 64
DAMAGED = "damaged-"
REASON = "reason.txt"
LAST_STEP = 10**18 - 1  # that a name has room for


class Unreachable(OSError):
    """A place does not answer, or refuses. That says nothing about what lies there, so nothing there is given up."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a name is of; None where it is no checkpoint's name."""
    match = re.fullmatch(r"step-([0-9]{8,18})", name)
    # One with a zero too many would be looked for under another name.
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def check_name(name: str) -> None:
    """Refuse what would lead out of a checkpoint's directory. No caller of ours has such a name."""
    if not is_file_name(name) and name != NAME:
        raise ValueError(f"{name!r} is no name of a checkpoint's file, or of an attempt")


class CheckpointStorage(Protocol):
    """Checkpoints by their steps. Ranks write files of one in parallel; then one of them commits it, or none does."""

    def committed(self) -> list[int]:
        """The steps of all committed checkpoints, oldest first."""

    def name(self, step: int) -> str:
        """For messages."""

    def write(self, step: int, attempt: str, file: str, content: Iterable[memoryview]) -> str:
        """Write a file of a checkpoint that is not committed yet, and return the name that it has there.

        ``attempt``: whose it is, of several that died.
        """

    def commit(self, step: int, attempt: str, manifest: str) -> None: ...

    def abandon(self, step: int, attempt: str) -> None: ...

    def clear(self) -> None:
        """Remove what earlier attempts left unfinished."""

    def remove(self, step: int) -> None: ...

    def share_removal(self, ranks: int) -> None:
        """So many write files here. Of many each removes its own, with ``remove_share``, and none all of them."""

    def remove_share(self, files: Iterable[str]) -> None:
        """Of checkpoints that are being removed, the files with these names."""

    def remove_rest(self) -> None:
        """On the first rank, after a save: what is left of those that were being removed at the save before."""

    def set_aside(self, step: int, reason: str) -> None:
        """Take a damaged checkpoint out of the way, and keep it."""

    def read_manifest(self, step: int) -> bytes: ...

    def size(self, step: int, file: str) -> int: ...

    def read(self, step: int, file: str, position: int, into: memoryview) -> None: ...


def manifest_of(place: CheckpointStorage, step: int) -> Manifest:
    """What a checkpoint says of itself, verified; what its parts list is verified as they are read."""
    return parse_manifest(place.read_manifest(step), f"{place.name(step)}/{NAME}")


def check_file(place: CheckpointStorage, step: int, file: str, size: int) -> None:
    """Refuse a file that is missing, or not as long as it was written. Does not read its content."""
    found = place.size(step, file)
    if found != size:
        raise Damaged(f"{place.name(step)}/{file} has {found} bytes, and {size} were written")


class DirectoryStorage:
    """A directory of a file system. ``durable``: what is committed survives a loss of power."""

    def __init__(self, path: Path, durable: bool = True) -> None:
        self.path, self.durable = path, durable
        self._shared = False
        self._doomed: set[str] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DirectoryStorage) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def at(self, step: int) -> Path:
        return self.path / step_name(step)

    def name(self, step: int) -> str:
        return str(self.at(step))

    def committed(self) -> list[int]:
        """A rename is the commit, so a name is proof."""
        try:
            names = [entry.name for entry in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):  # perhaps removed just now
            return []
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def write(self, step: int, attempt: str, file: str, content: Iterable[memoryview]) -> str:
        aside = self.aside(step, attempt)
        check_name(file)
        aside.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (aside / file).open("wb", buffering=0) as handle:
            position = 0
            for part in content:
                _write_all(handle.fileno(), part)
                self._send_off(handle.fileno(), position, part.nbytes)
                position += part.nbytes
            if self.durable:
                os.fsync(handle.fileno())
        return file

    def commit(self, step: int, attempt: str, manifest: str) -> None:
        aside, target = self.aside(step, attempt), self.at(step)
        self.write(step, attempt, NAME, [memoryview(manifest.encode())])
        if self.durable:
            sync_directory(aside)
        if target.exists():
            # The same step, committed by an attempt whose later ones were lost: the same state.
            self.remove(step)
        aside.rename(target)
        if self.durable:
            sync_directory(self.path)

    def abandon(self, step: int, attempt: str) -> None:
        shutil.rmtree(self.aside(step, attempt), ignore_errors=True)

    def clear(self) -> None:
        for entry in self.path.glob(UNFINISHED + "*"):
            if not self._shared:
                shutil.rmtree(entry, ignore_errors=True)
            elif not entry.name.startswith(REMOVED):
                entry.rename(self.path / f"{REMOVED}{entry.name.removeprefix(UNFINISHED)}")

    def remove(self, step: int) -> None:
        # Renamed first: a half-removed checkpoint must not be taken for a whole one.
        doomed = self.at(step).rename(self.path / f"{REMOVED}{step}-{os.getpid()}")
        if not self._shared:
            shutil.rmtree(doomed, ignore_errors=True)

    def share_removal(self, ranks: int) -> None:
        self._shared = ranks > REMOVED_BY_ONE

    def remove_share(self, files: Iterable[str]) -> None:
        for entry in self.path.glob(REMOVED + "*") if self._shared else ():
            for file in files:
                (entry / file).unlink(missing_ok=True)

    def remove_rest(self) -> None:
        """Others may have looked for their files before it was renamed, but not twice."""
        if self._shared:
            found = {entry.name for entry in self.path.glob(REMOVED + "*")}
            for name in found & self._doomed:
                shutil.rmtree(self.path / name, ignore_errors=True)
            self._doomed = found - self._doomed

    def set_aside(self, step: int, reason: str) -> None:
        number = 0
        while (target := self.path / f"{DAMAGED}{self.at(step).name}{f'.{number}' * bool(number)}").exists():
            number += 1
        self.at(step).rename(target)
        replace_text(target / REASON, reason + "\n")

    def read_manifest(self, step: int) -> bytes:
        size = self.size(step, NAME)
        if size > LARGEST_MANIFEST:
            raise Damaged(f"{self.at(step) / NAME} is too long for a manifest: {size} bytes")
        content = bytearray(size)
        self.read(step, NAME, 0, memoryview(content))
        return bytes(content)

    def size(self, step: int, file: str) -> int:
        return self._look(step, file).st_size

    def read(self, step: int, file: str, position: int, into: memoryview) -> None:
        self._look(step, file)
        path = self.at(step) / file
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            done = 0
            while done < into.nbytes:
                count = os.preadv(handle, [into[done:]], position + done)
                if not count:
                    raise Damaged(f"{path} ends before byte {position + into.nbytes}")
                done += count
        finally:
            os.close(handle)

    def _look(self, step: int, file: str) -> os.stat_result:
        path = self.at(step) / file
        try:
            found = path.lstat()
        except OSError as error:
            raise Damaged(f"{path} is missing ({error.strerror})") from None
        # A link, a pipe or a device is nothing that we wrote.
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{path} is no file of its own")
        return found

    def aside(self, step: int, attempt: str) -> Path:
        """Where a checkpoint lies before it is committed."""
        check_name(attempt)
        return self.path / f"{UNFINISHED}{self.at(step).name}-{attempt}"

    def _send_off(self, handle: int, position: int, size: int) -> None:
        """Let what was just written be on its way to the disk, which would else stand idle until the end."""
        if self.durable and hasattr(os, "posix_fadvise"):
            # To Linux this says: write it out, wait for nothing.
            os.posix_fadvise(handle, position, size, os.POSIX_FADV_DONTNEED)


def _write_all(handle: int, content: memoryview) -> None:
    content = content.cast("B")
    while content.nbytes:
        content = content[os.write(handle, content[: 1 << 28]) :]
