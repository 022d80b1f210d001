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

LINE_ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz")
# Their bytes are no text; without this they would be reported as text in a wrong encoding.
UNREADABLE_ENDINGS = (".parquet", ".arrow", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".tar.gz")
NOT_LIBRARY_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """One file of text, as it was when we looked."""

    path: Path
    name: str  # as a person would write it
    kind: Literal["text", "lines"]  # one document a file, or one JSON object a line
    compressed: bool
    size: int
    modified: int  # nanoseconds

    def unchanged(self) -> bool:
        try:
            now = self.path.stat()
        except OSError:
            return False
        return (now.st_size, now.st_mtime_ns) == (self.size, self.modified)


def find_files(source: str) -> list[SourceFile]:
    """The files of ``stdlib`` (this interpreter's standard library), of a path, or of a glob."""
    if source == "stdlib":
        return _standard_library(Path(sysconfig.get_path("stdlib")))
    return _matching(source)


def _standard_library(root: Path) -> list[SourceFile]:
    names: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY_TEXT]
        paths = (Path(folder) / name for name in files if name.endswith(".py"))
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    # An empty __init__.py is no document, and no fault of the library either.
    found = [file for name in sorted(names) if (file := _look_at(root / name, name)).size > 0]
    if not found:
        raise BadInput(
            "this Python has no source text of its standard library",
            "set data.source to a glob such as 'texts/*.txt'",
        )
    return found


def _matching(source: str) -> list[SourceFile]:
    pattern = str(Path(source).expanduser())
    if Path(pattern).is_dir():
        raise BadInput(
            f"data.source {source!r} is a directory, but not a prepared dataset",
            f"name its files with a glob, such as {str(Path(source) / '**' / '*.txt')!r}",
        )
    if Path(pattern).is_file():  # taken literally: a name may have brackets in it
        names = [pattern]
    else:
        names = sorted({name.removeprefix("./") for name in _expand(pattern) if Path(name).is_file()})
    if not names:
        raise BadInput(
            f"data.source {source!r} names no file",
            "check the path: a config's are relative to its directory, those of --set to the working directory; "
            "or use 'stdlib', which every machine has",
        )
    foreign = [name for name in names if name.lower().endswith(UNREADABLE_ENDINGS)]
    if foreign:
        raise BadInput(
            f"{len(foreign)} of {len(names)} files are neither text nor JSON lines, such as {foreign[0]!r}",
            "convert them to .jsonl or .jsonl.gz with one object a line, its text under data.field",
        )
    return [_look_at(Path(name), name) for name in names]


def _expand(pattern: str) -> Iterator[str]:
    """What a glob names. Below ``**`` no link to a directory is followed: it may lead back to where we are."""
    before, recursive, after = _cut_at_recursion(pattern)
    for found in glob.iglob(before):  # noqa: PTH207 (Path.glob takes no absolute pattern)
        if not recursive:
            yield found
            continue
        for folder, folders, _ in os.walk(found):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from _expand(os.path.join(glob.escape(folder), after or "*"))  # noqa: PTH118 (keeps a leading ./)


def _cut_at_recursion(pattern: str) -> tuple[str, bool, str]:
    """What stands before the first part that is ``**``, whether there is one, and what stands after it."""
    parts = pattern.split("/")
    if "**" not in parts:
        return pattern, False, ""
    here = parts.index("**")
    return "/".join(parts[:here]) + "/" if here else "./", True, "/".join(parts[here + 1 :])


def _look_at(path: Path, name: str) -> SourceFile:
    status = path.stat()
    lower = name.lower()
    return SourceFile(
        path=path.absolute(),
        name=name,
        kind="lines" if lower.endswith(LINE_ENDINGS) else "text",
        compressed=lower.endswith(".gz"),
        size=status.st_size,
        modified=status.st_mtime_ns,
    )
