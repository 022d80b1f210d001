"""The line number of every key in a TOML file, for error messages; the standard parser does not keep them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass

KeyPath = tuple[str, ...]

_TOKEN = re.compile(
    r'''(?P<text>"""(?:\\.|[^\\])*?"{3,5} | \'\'\'.*?'{3,5} | "(?:\\.|[^"\\\n])*" | '[^'\n]*')
    | (?P<comment>\#[^\n]*)
    | (?P<word>[A-Za-z0-9_-]+)
    | (?P<mark>[][{}=,\n])''',
    re.VERBOSE | re.DOTALL,
)


@dataclass
class _OpenTable:
    """An enclosing table, inline table or array."""

    path: KeyPath
    index: int | None = None  # in an array: the index of the current item


def key_lines(text: str) -> dict[str, int]:
    """``{"recipe.lr": 3, …}`` for valid TOML: where each key and table was first written.

    Items of arrays count from 0: ``data.mix.1.weight`` belongs to the second ``[[data.mix]]``.
    """
    lines: dict[KeyPath, int] = {}
    items: dict[KeyPath, int] = {}  # arrays of tables, with the last index of each
    frames = [_OpenTable(())]
    parts: list[str] = []  # of the current key
    in_key, brackets = True, 0  # brackets: those open around a header
    number, seen = 1, 0
    for token in _TOKEN.finditer(text):
        number += text.count("\n", seen, token.start())
        seen = token.start()
        mark, frame = token["mark"], frames[-1]
        if token["comment"]:
            continue
        if in_key and (token["word"] or token["text"]):
            parts.append(token["word"] or tomllib.loads(f"key = {token['text']}")["key"])
        elif in_key and mark == "[":
            brackets += 1
        elif in_key and mark == "]" and parts:
            frame.path = _header(parts, brackets == 2, items)
            # A table in an array also locates the array: its line is that of the first item.
            for path in (frame.path, tuple(parts)):
                lines.setdefault(path, number)
            parts, brackets = [], 0
        elif in_key and mark == "=":
            lines.setdefault((*frame.path, *parts), number)
            in_key = False
        elif mark in ("[", "{"):
            path = (*frame.path, *parts) if frame.index is None else (*frame.path, str(frame.index))
            frames.append(_OpenTable(path, 0 if mark == "[" else None))
            parts, in_key = [], mark == "{"
        elif mark in ("]", "}") and len(frames) > 1:
            frames.pop()
            in_key = False
        elif mark == "," and frame.index is not None:
            frame.index += 1
        elif mark == "," or (mark == "\n" and len(frames) == 1):
            parts, in_key = [], True
    return {".".join(path): line for path, line in lines.items()}


def _header(parts: list[str], array: bool, items: dict[KeyPath, int]) -> KeyPath:
    """The path of a ``[table]`` or ``[[array]]`` header, including the items of enclosing arrays."""
    path: KeyPath = ()
    for position, part in enumerate(parts, start=1):
        path = (*path, part)
        if array and position == len(parts):
            items[path] = items.get(path, -1) + 1
        if path in items:
            path = (*path, str(items[path]))
    return path
