"""Tokenise text once into a directory named after its content, which later runs reuse."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from blake3 import blake3

from shoal.facts.cluster.this_machine import usable_threads
from shoal.facts.losses import Format
from shoal.facts.problem import BadInput
from shoal.train.data.bad_rows import BadRows, count_bad_rows, located, read_bad_rows, refuse_too_many
from shoal.train.data.dataset import MANIFEST, QUARANTINE, Dataset
from shoal.train.data.encode import Encoded, EncodeTask, group, token_type
from shoal.train.data.encode_all import encode_all
from shoal.train.data.remote import MAGIC, fetch, is_remote, look, recall, remember
from shoal.train.data.row_format import RowFormat, row_format
from shoal.train.data.rows import cut
from shoal.train.data.shards import (
    FORMAT,
    HashedFile,
    SplitWriter,
    TokenBlock,
    split_at,
    split_by_document,
    spooled_blocks,
    whole_documents_work,
    write_manifest,
)
from shoal.train.data.sources import SourceFile, describe_file, find_files, look_at_all
from shoal.train.data.streamed import find_streamed
from shoal.train.data.tokenizers import Tokenizer, open_tokenizer
from shoal.train.files import sync_directory

FETCHED = "fetched"
UNFINISHED = ".preparing-"  # prefix of unfinished directories; nothing opens them
STALE_SECONDS = 900  # a live process writes every few seconds


def prepare(
    source: str,
    *,
    tokenizer: str = "bytes",
    end_token: str | None = None,
    field: str = "text",
    format: Format = "text",
    template: str = "auto",
    loss_on: Literal["answers", "all"] | None = None,
    cache: Path,
    heldout: float = 0.01,
    max_bad_rows: float = 0.01,
    workers: int = 0,
    ray: str | None = None,
    keep: int = 0,
    progress: Callable[[int, int], None] | None = None,
    key: str = "data.source",
) -> Path:
    """The directory of the tokenised source, created now or found.

    ``source`` is ``stdlib``, a path, a glob, a URL, or a directory made by an earlier call. ``heldout`` and
    ``max_bad_rows`` are fractions of all documents and of all rows; ``workers`` = 0 means one per core; ``ray``: use
    the nodes of a Ray cluster instead; ``progress`` receives bytes done and total bytes. ``keep``: how many shards of a
    directory behind a URL to keep locally at a time; 0: all. ``key``: the setting that named the source, for messages.
    """
    cache = cache.expanduser()
    opened = open_tokenizer(tokenizer, end_token)
    given = Path(source).expanduser()
    if source != "stdlib" and (given / MANIFEST).is_file():
        return _prepared_before(given, opened)
    if is_remote(source) and not MAGIC & set(source):
        streamed = find_streamed(source, cache, keep)
        if streamed is not None:
            return _prepared_before(streamed, opened)

    reading = row_format(opened, end_token, field, format, template, loss_on)
    job = _Preparation(
        source,
        tokenizer,
        end_token,
        opened,
        reading,
        cache,
        heldout,
        max_bad_rows,
        workers,
        ray,
        progress,
        key,
    )
    return job.from_url() if is_remote(source) else job.from_files()


@dataclass(frozen=True)
class _Preparation:
    """Everything that determines a prepared directory, except the files."""

    source: str
    tokenizer: str
    end_token: str | None
    opened: Tokenizer
    reading: RowFormat
    cache: Path
    heldout: float
    max_bad_rows: float
    workers: int
    ray: str | None
    progress: Callable[[int, int], None] | None
    key: str

    def from_files(self) -> Path:
        files = find_files(self.source, self.key)
        self._refuse_whole_texts(files)
        target = self.cache / self._key(files, [_digest(file) for file in files])
        if not self._found(target):
            with _unfinished_directory(self.cache) as directory:
                self._make(files, directory, target)
        return target

    def from_url(self) -> Path:
        """Like ``from_files``; files are fetched if their tokens are not here yet."""
        listed = look(self.source)
        digests = recall(listed, self.cache)
        names = [(Path(one.url), one.url) for one in listed]
        if digests is not None:
            known = [
                describe_file(path, name, one.size) for (path, name), one in zip(names, listed, strict=True)
            ]
            target = self.cache / self._key(known, digests)
            if self._found(target):
                return target
        with _unfinished_directory(self.cache) as directory:
            copies = fetch(self.source, listed, directory / FETCHED)
            files = look_at_all(
                [(copy, name) for copy, (_, name) in zip(copies, names, strict=True)], self.source
            )
            self._refuse_whole_texts(files)
            digests = [_digest(file) for file in files]
            remember(listed, digests, self.cache)
            target = self.cache / self._key(files, digests)
            if not self._found(target):
                self._make(files, directory, target)
        return target

    def _found(self, target: Path) -> bool:
        if not target.exists():
            return False
        found = Dataset.open(target)
        refuse_too_many(read_bad_rows(found.manifest, target / QUARANTINE), self.max_bad_rows, self.source)
        return True

    def _make(self, files: list[SourceFile], directory: Path, target: Path) -> None:
        spool = directory / "spool"
        spool.mkdir()
        tasks = list(group((piece for file in files for piece in cut(file)), spool, self.reading))
        workers = self.workers or usable_threads()
        results = encode_all(
            tasks, self.opened, self.tokenizer, self.end_token, workers, self.progress, self.ray
        )
        _refuse_changed(files)
        bad = count_bad_rows(tasks, results)
        refuse_too_many(bad, self.max_bad_rows, self.source)
        opened, size = self.opened, sum(file.size for file in files)
        manifest = {
            "format": FORMAT,
            "source": {"text": self.source, "files": len(files), "bytes": size},
            "field": self.reading.field,
            "tokenizer": {"text": self.tokenizer, "fingerprint": opened.fingerprint, "vocab": opened.vocab},
            "end": opened.end,
            **({"answers": True} if self.reading.answers_only else {}),
            **({"pairs": True} if self.reading.pairs else {}),
            **_write_dataset(directory, tasks, results, bad, opened, self.heldout),
        }
        write_manifest(directory / MANIFEST, manifest)
        _publish(directory, target)

    def _key(self, files: list[SourceFile], digests: list[str]) -> str:
        """A hash of what determines the result. File names do not count: moved text is the same text."""
        content = [
            # gzip is recorded as a boolean: it came first, when there was no other compression.
            [file.kind, {"": False, ".gz": True}.get(file.compression, file.compression), file.size, digest]
            for file, digest in zip(files, digests, strict=True)
        ]
        parts = [FORMAT, content, self.opened.fingerprint, *self.reading.key(), self.heldout]
        return blake3(json.dumps(parts).encode()).hexdigest()[:32]

    def _refuse_whole_texts(self, files: list[SourceFile]) -> None:
        texts = [file.name for file in files if file.kind == "text"]
        if texts and self.reading.format != "text":
            raise BadInput(
                f'data.format = "{self.reading.format}" reads rows, but {texts[0]!r} is one text',
                "name files of rows, such as 'chats/*.jsonl'",
            )


def _digest(file: SourceFile) -> str:
    try:
        return blake3(max_threads=blake3.AUTO).update_mmap(file.path).hexdigest()
    except OSError as error:
        raise BadInput(f"cannot read {file.name!r}: {error.strerror}", "check its permissions") from None


def _prepared_before(path: Path, tokenizer: Tokenizer) -> Path:
    made_with = Dataset.open(path).manifest["tokenizer"]
    if made_with["fingerprint"] != tokenizer.fingerprint:
        raise BadInput(
            f"the dataset {str(path)!r} was made with another tokenizer ({made_with['text']!r})",
            f"set data.tokenizer to {made_with['text']!r}, or prepare the dataset again",
        )
    return path


def _refuse_changed(files: list[SourceFile]) -> None:
    """Refuse files that changed meanwhile: the directory's name promises the content that was hashed before it was
    read.
    """
    changed = [file.name for file in files if not file.unchanged()]
    if changed:
        raise BadInput(
            f"{len(changed)} source files changed while they were read, such as {changed[0]!r}",
            "run again when nothing writes to them",
        )


def _write_dataset(
    directory: Path,
    tasks: list[EncodeTask],
    results: list[Encoded],
    bad: BadRows,
    tokenizer: Tokenizer,
    heldout: float,
) -> dict[str, Any]:
    """Write both splits and the quarantine; returns their part of the manifest."""
    quarantine = HashedFile(directory / QUARANTINE)
    for row in located(tasks, results):
        quarantine.write(json.dumps(row).encode() + b"\n")

    splits = {name: SplitWriter(directory, name) for name in ("train", "heldout")}
    tokens = sum(result.tokens for result in results)
    documents = sum(result.documents for result in results)
    blocks = _all_blocks(tasks, tokenizer)
    together = 2 if tasks[0].reading.pairs else 1
    if heldout > 0 and whole_documents_work(documents // together, heldout):
        split_by_document(blocks, heldout, splits["train"], splits["heldout"], together)
    else:
        # A single long text has no other document to hold out, so its end is held out.
        cut_at = tokens - max(1, round(tokens * heldout)) if heldout > 0 else tokens
        if tasks[0].reading.template is not None:
            cut_at = _between_documents(tasks, results, documents, heldout, together)
        split_at(blocks, cut_at, tokenizer.end, splits["train"], splits["heldout"])

    hashes: dict[str, dict[str, Any]] = {QUARANTINE: quarantine.close()}
    for split in splits.values():
        split.close()
        hashes.update(split.files)
    ends = [np.fromfile(directory / f"documents-{name}.bin", dtype="<i8") for name in splits]
    known = np.concatenate([np.fromfile(task.file("hashes"), dtype="<u8") for task in tasks])
    return {
        "dtype": token_type(tokenizer).str,
        "duplicates": len(known) - len(np.unique(known)),  # repeats of earlier documents
        "longest": max((int(np.diff(one, prepend=0).max()) for one in ends if len(one)), default=0),
        "largest_id": max(result.largest for result in results),
        "heldout": heldout,
        "splits": {name: split.describe() for name, split in splits.items()},
        "rows": bad.rows,
        "bad_rows": bad.reasons,
        "files": hashes,
    }


def _between_documents(
    tasks: list[EncodeTask], results: list[Encoded], documents: int, heldout: float, together: int
) -> int:
    """Where the last conversations begin, which are held out: at least one if there are two.

    Groups of ``together`` conversations are never separated.
    """
    ends: list[int] = [0]
    before = 0
    for task, result in zip(tasks, results, strict=True):
        ends += (np.fromfile(task.file("ends"), dtype="<i8") + before).tolist()
        before += result.tokens
    groups = documents // together
    held = min(max(1, round(groups * heldout)), groups - 1) if heldout > 0 else 0
    return ends[documents - held * together]


def _all_blocks(tasks: list[EncodeTask], tokenizer: Tokenizer) -> Iterator[TokenBlock]:
    for task in tasks:
        answers = task.file("answers") if task.reading.answers_only else None
        yield from spooled_blocks(task.file("tokens"), task.file("ends"), answers, token_type(tokenizer))
        task.file("tokens").unlink()  # so that the disk need not hold everything twice


@contextlib.contextmanager
def _unfinished_directory(cache: Path) -> Iterator[Path]:
    """A private directory beside the final one. Afterwards it has been renamed or removed."""
    directory = cache / f"{UNFINISHED}{uuid.uuid4().hex}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache)
        directory.mkdir()
    except OSError as error:
        raise BadInput(
            f"cannot write to the data cache {str(cache)!r}: {error.strerror}",
            "name another directory for it",
        ) from None
    try:
        with (directory / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_stale(cache: Path) -> None:
    """Remove what dead runs left: the lock is free, and nothing was written for a while.

    The lock alone is not enough: a shared file system may not enforce it across machines.
    """
    for directory in cache.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):  # its owner, or another cleaner, may be removing it now
            newest = max(path.stat().st_mtime for path in (directory, *directory.rglob("*")))
            if time.time() - newest > STALE_SECONDS and not _locked(directory / "lock"):
                shutil.rmtree(directory, ignore_errors=True)


def _locked(path: Path) -> bool:
    try:
        file: IO[bytes] = path.open("rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _publish(directory: Path, target: Path) -> None:
    """Give the finished directory its name, atomically. If another process was first, its directory is used."""
    shutil.rmtree(directory / "spool")
    shutil.rmtree(directory / FETCHED, ignore_errors=True)
    (directory / "lock").unlink()
    sync_directory(directory)
    try:
        directory.rename(target)
    except OSError:
        if not (target / MANIFEST).is_file():
            raise
    sync_directory(target.parent)
