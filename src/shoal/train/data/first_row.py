"""Infer the format of a source from its first row: text, conversations, or prompts with answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.train.data import remote
from shoal.train.data.compression import DAMAGE, open_compressed
from shoal.train.data.conversations import CONVERSATIONS, PAIRS
from shoal.train.data.sources import SourceFile, find_files
from shoal.train.data.streamed import MANIFEST
from shoal.train.data.tables import read_table

LONGEST_FIRST = 1 << 24  # the most bytes of a line to examine


def look_at_rows(source: str, key: str = "data.source") -> dict[str, Any]:
    """Values of the ``[data]`` table that should differ from their defaults; BadInput if the source matches no file."""
    if source == "stdlib" or remote.is_remote(source) or (Path(source).expanduser() / MANIFEST).is_file():
        return {}
    row = _first(find_files(source, key)[0])
    if any(name in row for name in CONVERSATIONS):
        return {"format": "chat"}
    if "text" in row:
        return {}
    if any(prompt in row and answer in row for prompt, answer in PAIRS):
        return {"format": "prompt"}
    texts = {name: len(value) for name, value in row.items() if isinstance(value, str)}
    return {"field": max(texts, key=lambda name: texts[name])} if texts else {}


def _first(file: SourceFile) -> dict[str, Any]:
    """The first row; empty if it is missing or unreadable: preparing the data reports what is wrong."""
    try:
        if file.kind == "table":
            return next(read_table(file.path, file.name, range(1), None), {})
        if file.kind == "text":
            return {}
        opened = open_compressed(file.path, file.compression) if file.compressed else file.path.open("rb")
        with opened as lines:
            row = json.loads(lines.readline(LONGEST_FIRST).decode("utf-8-sig"))
    except (*DAMAGE, OSError, ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
