"""The files that ``data.source`` names, in an order that depends only on their names."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.facts.problem import BadInput
from shoal.train.data import compression, tables

LINE_ENDINGS = (".jsonl", ".ndjson")
# Their bytes are not text; without this list they would be reported as text in a wrong encoding.
UNREADABLE_ENDINGS = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz", ".orc", ".avro")
NOT_LIBRARY_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """One source file, as it was when we looked."""

    path: Path
    name: str  # in readable form
    kind: Literal[
        "text", "lines", "table"
    ]  # one document per file, one JSON object per line, or one row of a table
    compression: str  # its extension; empty if uncompressed
    size: int
    modified: int  # nanoseconds

    @property
    def compressed(self) -> bool:
        return bool(self.compression)

    def unchanged(self) -> bool:
        try:
            now = self.path.stat()
        except OSError:
            return False
        return (now.st_size, now.st_mtime_ns) == (self.size, self.modified)


def find_files(source: str, key: str = "data.source") -> list[SourceFile]:
    """The files of ``stdlib`` (this interpreter's standard library), of a path, or of a glob.

    ``key``: the setting that named it, for messages.
    """
    if source == "stdlib":
        return _standard_library(Path(sysconfig.get_path("stdlib")))
    return _matching(source, key)


def _standard_library(root: Path) -> list[SourceFile]:
    names: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY_TEXT]
        paths = (Path(folder) / name for name in files if name.endswith(".py"))
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    # An empty __init__.py is not a document, and not a fault of the library either.
    found = [file for name in sorted(names) if (file := _look_at(root / name, name)).size > 0]
    if not found:
        raise BadInput(
            "this Python has no source text of its standard library",
            "set data.source to a glob such as 'texts/*.txt'",
        )
    return found


def _matching(source: str, key: str) -> list[SourceFile]:
    pattern = str(Path(source).expanduser())
    if Path(pattern).is_dir():
        saved = tables.saved_files(Path(pattern))
        if saved is not None:
            return look_at_all([(file, str(file)) for file in saved], source)
        raise BadInput(
            f"{key} {source!r} is a directory, but not a prepared dataset",
            f"name its files with a glob, such as {str(Path(source) / '**' / '*.txt')!r}",
        )
    if Path(pattern).is_file():  # taken literally: a name may contain brackets
        names = [pattern]
    else:
        names = sorted({name.removeprefix("./") for name in _expand(pattern) if Path(name).is_file()})
    if not names:
        raise BadInput(
            f"{key} {source!r} names no file",
            "check the path: a config's are relative to its directory, those of the command line to the working "
            "directory" + ("; or use 'stdlib', which every machine has" if key == "data.source" else ""),
        )
    return look_at_all([(Path(name), name) for name in names], source)


def look_at_all(paths: list[tuple[Path, str]], source: str) -> list[SourceFile]:
    """Describe these (path, name) files; BadInput if one cannot be read here."""
    names = [name for _, name in paths]
    if missing := [name for path, name in paths if not path.is_file()]:
        raise BadInput(f"{missing[0]!r} of data.source {source!r} is missing", "fetch or save it again")
    foreign = [name for name in names if name.lower().endswith(UNREADABLE_ENDINGS)]
    if foreign:
        raise BadInput(
            f"{len(foreign)} of {len(names)} files are neither text nor rows, such as {foreign[0]!r}",
            "unpack them, or convert them to .jsonl or .parquet with the text of a row under data.field",
        )
    found = [_look_at(path, name) for path, name in paths]
    for file in found:
        compression.check_readable(file.compression, file.name)
        if file.kind == "table":
            tables.check_readable(file.name)
    return found


def _expand(pattern: str) -> Iterator[str]:
    """Expand a glob. Below ``**`` links to directories are not followed: they may lead back here."""
    before, recursive, after = _cut_at_recursion(pattern)
    for found in glob.iglob(before):  # noqa: PTH207 (Path.glob takes no absolute pattern)
        if not recursive:
            yield found
            continue
        for folder, folders, _ in os.walk(found):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from _expand(os.path.join(glob.escape(folder), after or "*"))  # noqa: PTH118 (keeps a leading ./)


def _cut_at_recursion(pattern: str) -> tuple[str, bool, str]:
    """The part before the first ``**``, whether there is one, and the part after it."""
    parts = pattern.split("/")
    if "**" not in parts:
        return pattern, False, ""
    here = parts.index("**")
    return "/".join(parts[:here]) + "/" if here else "./", True, "/".join(parts[here + 1 :])


def _look_at(path: Path, name: str) -> SourceFile:
    status = path.stat()
    return describe_file(path, name, status.st_size, status.st_mtime_ns)


def describe_file(path: Path, name: str, size: int, modified: int = 0) -> SourceFile:
    """Describe a file by its name, which says what it contains."""
    packed = compression.ending(name)
    bare = name.lower().removesuffix(packed)
    kind: Literal["text", "lines", "table"] = "text"
    if bare.endswith(LINE_ENDINGS) or (packed and bare.endswith(".json")):
        kind = "lines"
    elif not packed and bare.endswith(tables.ENDINGS):
        kind = "table"
    return SourceFile(path.absolute(), name, kind, packed, size, modified)
