"""Checkpoints in an object store through fsspec, where nothing can be renamed, so the manifest is the commit.

Below a URL each checkpoint has its own prefix: ``step-00000100/rank-00003-ATTEMPT.bin``, one per rank, and last of all
``manifest.json``, which a store writes atomically. Without a manifest there is no checkpoint. File names contain the
attempt that wrote them, so what a dead attempt left never becomes part of a later attempt's checkpoint.

fsspec's file systems retry transient errors themselves (s3fs: five times, with growing pauses), so nothing is retried
here. Needs no torch, and fsspec only once it is used.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.facts.problem import BadInput
from shoal.facts.redact import harmless
from shoal.train.checkpoint.manifest import LARGEST_MANIFEST, NAME, Damaged, parse_manifest
from shoal.train.checkpoint.storage import DAMAGED, REASON, Unreachable, check_name, step_name, step_of
from shoal.train.files import disk_is_full

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PROBE = "writable"
# Read in parts of this size, because fsspec returns copies.
PART = 1 << 24
# Up to this many files, sizes are asked for one by one: a rank of many looks only at its share, which is a few.
QUESTIONS = 4
# Concurrent requests.
REQUESTS = 16
EXAMPLE = 'checkpoint.to = "s3://bucket/runs"'

One = TypeVar("One")
Other = TypeVar("Other")


class ObjectStore:
    """A prefix in an object store, or anything else fsspec can write to: ``s3://bucket/runs/name``."""

    def __init__(self, url: str) -> None:
        check_url(url)
        self.url = url.rstrip("/")
        # File sizes of the checkpoint whose manifest was read last: many files are served from one listing.
        self._sizes: tuple[int, dict[str, int]] | None = None
        self._questions = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStore) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[str]]:
        """Another process makes its own connections."""
        return ObjectStore, (self.url,)

    def beside(self, suffix: str) -> ObjectStore:
        return ObjectStore(self.url + suffix)

    @cached_property
    def files(self) -> AbstractFileSystem:
        return _connect(self.url)

    @cached_property
    def root(self) -> str:
        return str(self.files._strip_protocol(self.url)).rstrip("/")

    def check(self) -> None:
        """Refuse a place that cannot be listed, written to or deleted from, before anything depends on it."""
        try:
            with self._asked():
                path = f"{self.root}/{PROBE}"
                self._list(self.root)
                self.files.pipe_file(path, b"shoal")
                self.files.rm_file(path)
        except OSError as error:
            # With the store's own message, which is about names and permissions and holds no secret.
            raise BadInput(
                f"checkpoint.to: {error if isinstance(error, Unreachable) else f'{self.url}: {error}'}",
                "credentials that may list, write and delete there, as fsspec finds them (environment, files of the "
                "store's own tools, FSSPEC_… variables); and a bucket that exists",
            ) from None

    # Notes: files that are not checkpoints.

    def leave(self, name: str, text: str) -> None:
        with self._asked():
            self.files.pipe_file(f"{self.root}/{name}", text.encode())

    def left(self, name: str) -> str | None:
        """Read a note; None if it does not exist."""
        with self._asked():
            self.files.invalidate_cache()
            try:
                return bytes(self.files.cat_file(f"{self.root}/{name}")).decode(errors="replace")
            except FileNotFoundError:
                return None

    def notes(self) -> list[str]:
        """Names of everything beside the checkpoints."""
        with self._asked():
            return sorted(self._list(self.root))

    def take_away(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._asked():
            self.files.rm_file(f"{self.root}/{name}")

    # The interface of every checkpoint storage.

    def name(self, step: int) -> str:
        return f"{self.url}/{step_name(step)}"

    def committed(self) -> list[int]:
        with self._asked():
            steps = self._steps()
            return sorted(
                step for step, there in zip(steps, _each(self._has_manifest, steps), strict=True) if there
            )

    def write(self, step: int, attempt: str, file: str, content: Iterable[memoryview]) -> str:
        """Upload a file in parts: memory holds one or two parts and never the whole file."""
        stem, dot, ending = file.rpartition(".")
        named = f"{stem}-{attempt}{dot}{ending}"
        check_name(named)
        with self._asked():
            handle = self.files.open(self._at(step, named), "wb")
            try:
                for part in content:
                    handle.write(part)
                handle.close()
            except BaseException:
                _drop(handle)
                raise
        return named

    def commit(self, step: int, attempt: str, manifest: str) -> None:
        with self._asked():
            self.files.pipe_file(self._at(step, NAME), manifest.encode())
        # Leftovers of the same step, from attempts whose later steps were lost. They can wait for ``remove``.
        with contextlib.suppress(OSError), self._asked():
            there = self._list_step(step)
            if not _set_aside(there):
                self._delete(step, [file for file in there if _attempt_of(file) not in (None, attempt)])

    def abandon(self, step: int, attempt: str) -> None:
        with self._asked():
            # A commit without a response may have happened: remove the manifest first, because it names these files.
            with contextlib.suppress(FileNotFoundError):
                if f"-{attempt}.".encode() in self.files.cat_file(self._at(step, NAME)):
                    self.files.rm_file(self._at(step, NAME))
            self._delete(step, [file for file in self._list_step(step) if _attempt_of(file) == attempt])

    def clear(self) -> None:
        with self._asked():
            for step in self._steps():
                there = self._list_step(step)
                if NAME not in there and not _set_aside(there):
                    self._delete(step, [file for file in there if _attempt_of(file)])

    def remove(self, step: int) -> None:
        with self._asked():
            there = self._list_step(step)
            doomed = [file for file in there if _attempt_of(file)]
            if _set_aside(there):
                # Keep everything the manifest does not name: it may belong to what was set aside.
                named = self._named(step)
                doomed = [file for file in doomed if file in named]
            # Remove the manifest first: a half-removed checkpoint must not pass for a whole one.
            self.files.rm_file(self._at(step, NAME))
            self._delete(step, doomed)

    def share_removal(self, ranks: int) -> None:
        """Nothing to share: a store removes a thousand objects per request, so one rank sends it."""

    def remove_share(self, files: Iterable[str]) -> None: ...

    def remove_rest(self) -> None: ...

    def set_aside(self, step: int, reason: str) -> None:
        """Rename the manifest and leave the rest in place: then nothing is committed there."""
        with self._asked():
            there = self._list_step(step)
            number = 0
            while (target := f"{DAMAGED}{_numbered(NAME, number)}") in there:
                number += 1
            if NAME not in there:
                return
            self.files.cp_file(self._at(step, NAME), self._at(step, target))
            self.files.pipe_file(self._at(step, _numbered(REASON, number)), f"{reason}\n".encode())
            self.files.rm_file(self._at(step, NAME))

    def read_manifest(self, step: int) -> bytes:
        with self._asked(), self._missing(step, NAME):
            self._sizes, self._questions = None, 0
            self.files.invalidate_cache()
            if (size := int(self.files.info(self._at(step, NAME))["size"])) > LARGEST_MANIFEST:
                raise Damaged(f"{self.name(step)}/{NAME} is too long for a manifest: {size} bytes")
            return bytes(self.files.cat_file(self._at(step, NAME)))

    def size(self, step: int, file: str) -> int:
        if self._sizes is not None and self._sizes[0] == step and file in self._sizes[1]:
            return self._sizes[1][file]
        with self._asked(), self._missing(step, file):
            self._questions += 1
            if self._questions > QUESTIONS:
                self._questions, self._sizes = 0, (step, self._list_step(step))
                if file in self._sizes[1]:
                    return self._sizes[1][file]
            self.files.invalidate_cache()
            return int(self.files.info(self._at(step, file))["size"])

    def read(self, step: int, file: str, position: int, into: memoryview) -> None:
        path = self._at(step, file)
        with self._asked(), self._missing(step, file):
            for start in range(0, into.nbytes, PART):
                part = into[start : start + PART]
                begin = position + start
                # Keyword arguments, because their positions differ between file systems.
                found = self.files.cat_file(path, start=begin, end=begin + part.nbytes)
                if len(found) != part.nbytes:
                    raise Damaged(f"{self.name(step)}/{file} ends before byte {position + into.nbytes}")
                part[:] = found

    # Move a whole run.

    @property
    def empty(self) -> bool:
        with self._asked():
            return not self._list(self.root)

    def move(self, target: ObjectStore) -> None:
        """Copy all checkpoints, which a store does on its side, then remove them here."""
        with self._asked():
            for step in self._steps():
                there = sorted(self._list_step(step), key=lambda file: file == NAME)

                def copy(file: str, step: int = step) -> None:
                    self.files.cp_file(self._at(step, file), target._at(step, file))

                _each(copy, [file for file in there if file != NAME])
                if NAME in there:
                    copy(NAME)
                    self.files.rm_file(self._at(step, NAME))
                self._delete(step, [file for file in there if file != NAME])

    # Requests to the store.

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Translate store errors. Every store raises its own; except for missing files and full disks, all mean it
        is unusable.
        """
        try:
            yield
        except (Damaged, BadInput, FileNotFoundError, Unreachable):
            raise
        except Exception as error:
            if isinstance(error, OSError) and disk_is_full(error):
                raise
            raise Unreachable(f"{self.url}: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _missing(self, step: int, file: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise Damaged(f"{self.name(step)}/{file} is missing") from None

    def _named(self, step: int) -> set[str]:
        """The files that a manifest names; empty if it cannot be read."""
        try:
            return set(
                parse_manifest(self.files.cat_file(self._at(step, NAME)), self.name(step)).file_sizes()
            )
        except Damaged:
            return set()

    def _at(self, step: int, file: str) -> str:
        return f"{self.root}/{step_name(step)}/{file}"

    def _list(self, path: str) -> dict[str, int]:
        """The names directly below a path, with their lengths."""
        # Others write here too, so cached listings do not count.
        self.files.invalidate_cache()
        try:
            found = self.files.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {one["name"].rstrip("/").rpartition("/")[2]: int(one["size"] or 0) for one in found}

    def _list_step(self, step: int) -> dict[str, int]:
        """Only files that we may have written."""
        found = self._list(f"{self.root}/{step_name(step)}")
        return {file: size for file, size in found.items() if _ours(file)}

    def _steps(self) -> list[int]:
        """Steps of which any file exists."""
        return sorted(step for name in self._list(self.root) if (step := step_of(name)) is not None)

    def _has_manifest(self, step: int) -> bool:
        # Not ``exists``, which treats an error as "no".
        try:
            return bool(self.files.info(self._at(step, NAME))["type"] == "file")
        except FileNotFoundError:
            return False

    def _delete(self, step: int, files: list[str]) -> None:
        if files:
            self.files.rm([self._at(step, file) for file in files])
        if _is_local(self.url):
            # If prefixes are directories, they stay.
            with contextlib.suppress(OSError):
                self.files.rmdir(f"{self.root}/{step_name(step)}")


def check_url(url: str) -> None:
    """Refuse anything but a plain URL; a password in it would end up in files and messages."""
    scheme, separator, rest = url.partition("://")
    before, at, _ = rest.rpartition("@")
    if at and ":" in before:
        raise BadInput(
            f"checkpoint.to: {harmless(url)} holds a password",
            "leave it out: fsspec takes credentials from the environment and from the files of the store's own tools",
        )
    if not separator or not scheme or not rest.strip("/"):
        raise BadInput(f"checkpoint.to: {harmless(url)} is no URL", f"{EXAMPLE}, or file:///a/directory")
    if "::" in url or re.search(r"[\s*?\[\]#\x00-\x1f]", url):
        raise BadInput(
            f"checkpoint.to: {harmless(url)} cannot be a place for checkpoints: blanks, * ? [ ] # and :: have other "
            "meanings there",
            f"a plain URL, and a run directory with a plain name: {EXAMPLE}",
        )


def _connect(url: str) -> AbstractFileSystem:
    import fsspec
    from fsspec.registry import known_implementations

    scheme = url.partition("://")[0]
    try:
        return _private_directories() if _is_local(url) else fsspec.url_to_fs(url)[0]
    except ImportError as error:
        package = known_implementations[scheme]["class"].partition(".")[0]
        fix = f"pip install {package}" if package != "fsspec" else str(error)
        raise BadInput(f"checkpoint.to: {scheme}:// needs a package that is not installed", fix) from None
    except ValueError as error:
        if scheme in known_implementations:
            raise BadInput(f"checkpoint.to: {url}: {error}", EXAMPLE) from None
        raise BadInput(f"checkpoint.to: fsspec knows no {scheme}://", EXAMPLE) from None


@cache
def _private_directories() -> AbstractFileSystem:
    """A local file system whose prefixes are directories, created accessible to their owner only, as a run's are."""
    from fsspec.implementations.local import LocalFileSystem

    class Private(LocalFileSystem):
        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            here = Path(self._strip_protocol(path))
            missing = [folder for folder in (here, *here.parents) if not folder.exists()]
            for folder in reversed(missing):
                folder.mkdir(mode=0o700, exist_ok=True)
            if not missing and not exist_ok:
                raise FileExistsError(here)

    return Private(auto_mkdir=True)


def _is_local(url: str) -> bool:
    return url.startswith(("file://", "local://"))


def _drop(handle: Any) -> None:
    """Abort a write: parts already sent are discarded if the store can."""
    from fsspec.spec import AbstractBufferedFile

    with contextlib.suppress(Exception):
        if isinstance(handle, AbstractBufferedFile):
            # Its own ``close`` would complete the upload.
            handle.closed = True
            handle.discard()
        else:
            handle.close()


def _attempt_of(file: str) -> str | None:
    match = re.fullmatch(r"rank-[0-9]{5,}-([A-Za-z0-9-]+)\.(?:bin|json)", file)
    return match[1] if match else None


def _numbered(name: str, number: int) -> str:
    stem, dot, ending = name.rpartition(".")
    return f"{stem}-{number}{dot}{ending}" if number else name


def _set_aside(there: Iterable[str]) -> bool:
    return any(file.startswith(DAMAGED) for file in there)


def _ours(file: str) -> bool:
    aside = rf"{DAMAGED}manifest(-[0-9]+)?\.json|reason(-[0-9]+)?\.txt"
    return file == NAME or _attempt_of(file) is not None or re.fullmatch(aside, file) is not None


def _each(ask: Callable[[One], Other], of: Iterable[One]) -> list[Other]:
    """Ask several things concurrently, because each takes a while."""
    with ThreadPoolExecutor(REQUESTS, "shoal-store") as pool:
        return list(pool.map(ask, of))
