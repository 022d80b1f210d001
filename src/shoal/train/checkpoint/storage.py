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
# With up to this many ranks, one of them removes all files.
REMOVED_BY_ONE = 64
DAMAGED = "damaged-"
REASON = "reason.txt"
LAST_STEP = 10**18 - 1  # the largest that fits in a name


class Unreachable(OSError):
    """A place does not respond, or refuses access. That says nothing about its contents, so nothing there is given
    up.
    """


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name; None if it is not one."""
    match = re.fullmatch(r"step-([0-9]{8,18})", name)
    # A name with extra zeros would not be found again.
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def check_name(name: str) -> None:
    """Refuse names that lead out of a checkpoint's directory. Our own callers never use one."""
    if not is_file_name(name) and name != NAME:
        raise ValueError(f"{name!r} is no name of a checkpoint's file, or of an attempt")


class CheckpointStorage(Protocol):
    """Checkpoints by step. Ranks write files of one in parallel; then one rank commits it, or it does not exist."""

    def committed(self) -> list[int]:
        """The steps of all committed checkpoints, oldest first."""

    def name(self, step: int) -> str:
        """For messages."""

    def write(self, step: int, attempt: str, file: str, content: Iterable[memoryview]) -> str:
        """Write a file of an uncommitted checkpoint; returns the file's name there.

        ``attempt``: the attempt it belongs to; earlier ones may have died.
        """

    def commit(self, step: int, attempt: str, manifest: str) -> None: ...

    def abandon(self, step: int, attempt: str) -> None: ...

    def clear(self) -> None:
        """Remove what earlier attempts left unfinished."""

    def remove(self, step: int) -> None: ...

    def share_removal(self, ranks: int) -> None:
        """How many ranks write files here. If many, each removes its own with ``remove_share``."""

    def remove_share(self, files: Iterable[str]) -> None:
        """Remove these files from checkpoints that are being deleted."""

    def remove_rest(self) -> None:
        """On the first rank, after a save: remove what is left of checkpoints that were being deleted at the
        previous save.
        """

    def set_aside(self, step: int, reason: str) -> None:
        """Move a damaged checkpoint out of the way, and keep it."""

    def read_manifest(self, step: int) -> bytes: ...

    def size(self, step: int, file: str) -> int: ...

    def read(self, step: int, file: str, position: int, into: memoryview) -> None: ...


def manifest_of(place: CheckpointStorage, step: int) -> Manifest:
    """A checkpoint's manifest, verified; lists of parts are verified as they are read."""
    return parse_manifest(place.read_manifest(step), f"{place.name(step)}/{NAME}")


def check_file(place: CheckpointStorage, step: int, file: str, size: int) -> None:
    """Refuse a file that is missing or has the wrong length. Does not read its content."""
    found = place.size(step, file)
    if found != size:
        raise Damaged(f"{place.name(step)}/{file} has {found} bytes, and {size} were written")


class DirectoryStorage:
    """Checkpoints in a file-system directory. ``durable``: commits survive a power loss."""

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
        """A rename is the commit, so an existing name is proof."""
        try:
            names = [entry.name for entry in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):  # perhaps just removed
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
            # The same step, committed by an attempt whose later steps were lost: the same state.
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
        # Rename first: a half-removed checkpoint must not pass for a whole one.
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
        """Other ranks may have looked for their files before the rename, but not twice, so wait for the next save."""
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
        # A link, a pipe or a device is not something we wrote.
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{path} is no file of its own")
        return found

    def aside(self, step: int, attempt: str) -> Path:
        """Where a checkpoint is before it is committed."""
        check_name(attempt)
        return self.path / f"{UNFINISHED}{self.at(step).name}-{attempt}"

    def _send_off(self, handle: int, position: int, size: int) -> None:
        """Start writing back what was just written; otherwise the disk would idle until the end."""
        if self.durable and hasattr(os, "posix_fadvise"):
            # On Linux this starts writeback without waiting for it.
            os.posix_fadvise(handle, position, size, os.POSIX_FADV_DONTNEED)


def _write_all(handle: int, content: memoryview) -> None:
    content = content.cast("B")
    while content.nbytes:
        content = content[os.write(handle, content[: 1 << 28]) :]
