"""Source files behind a URL: listed and fetched through fsspec.

They are fetched once, tokenised, and discarded. The hash of each remains, stored under all metadata its server gives,
so a later run finds the tokens without fetching anything. Files without enough metadata are fetched again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from shoal.facts.problem import BadInput
from shoal.facts.redact import harmless

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# Metadata fields of file systems that change with a file's content.
VERSIONS = (
    "ETag",
    "etag",
    "md5",
    "md5Hash",
    "content_md5",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)
MAGIC = frozenset("*?[")


@dataclass(frozen=True)
class RemoteFile:
    """One file as its server describes it."""

    url: str
    size: int
    version: str  # empty if the server gives nothing that would change with the content

    @property
    def memo(self) -> str:
        return blake3(json.dumps([self.url, self.size, self.version]).encode()).hexdigest()


def is_remote(source: str) -> bool:
    return "://" in source


def connect(source: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        files, path = url_to_fs(source)
    except (ImportError, ValueError) as error:
        raise BadInput(
            f"data.source {harmless(source)!r}: {harmless(str(error))}",
            "a URL that fsspec knows, such as s3://bucket/texts/*.jsonl; s3 needs the s3fs package, gs gcsfs",
        ) from None
    return files, str(path)


def look(source: str) -> list[RemoteFile]:
    """The files that match a URL or a pattern of URLs, sorted by name."""
    files, path = connect(source)
    try:
        if MAGIC & set(path):
            names = [name for name, info in files.glob(path, detail=True).items() if info["type"] == "file"]
        else:
            names = [path] if files.isfile(path) else []
        found = [_described(files, name) for name in sorted(names)]
    except Exception as error:  # every file system raises its own errors, whose messages say what is wrong
        raise unreachable(source, error) from None
    if not found:
        raise BadInput(
            f"data.source {harmless(source)!r} names no file", "check the URL and the rights to it"
        )
    return found


def fetch(source: str, found: list[RemoteFile], directory: Path) -> list[Path]:
    """Local copies, valid as long as the directory exists."""
    files, _ = connect(source)
    directory.mkdir()
    copies = [directory / f"{number:06d}-{Path(one.url).name}" for number, one in enumerate(found)]
    try:
        files.get([files._strip_protocol(one.url) for one in found], [str(copy) for copy in copies])
    except Exception as error:
        raise unreachable(source, error) from None
    for one, copy in zip(found, copies, strict=True):
        if copy.stat().st_size != one.size:
            raise BadInput(f"{one.url} changed while it was fetched", "run again when nothing writes to it")
    return copies


def recall(found: list[RemoteFile], cache: Path) -> list[str] | None:
    """The hash of each file's content, if all are known."""
    if not all(one.version for one in found):
        return None
    try:
        return [(_memos(cache) / one.memo).read_text() for one in found]
    except OSError:
        return None


def remember(found: list[RemoteFile], digests: list[str], cache: Path) -> None:
    _memos(cache).mkdir(parents=True, exist_ok=True)
    for one, digest in zip(found, digests, strict=True):
        if one.version:
            (_memos(cache) / one.memo).write_text(digest)


def unreachable(source: str, error: Exception) -> BadInput:
    return BadInput(
        f"data.source {harmless(source)!r} cannot be read: {harmless(str(error) or type(error).__name__)}",
        "check the URL, the network and the credentials in the environment",
    )


def _memos(cache: Path) -> Path:
    return cache / "remote"


def _described(files: AbstractFileSystem, name: str) -> RemoteFile:
    info: dict[str, Any] = files.info(name)
    version = [f"{key}={info[key]}" for key in VERSIONS if info.get(key) is not None]
    return RemoteFile(str(files.unstrip_protocol(name)), int(info["size"]), "; ".join(version))
