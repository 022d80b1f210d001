"""Read untrusted JSON and TOML within limits on size, depth and content.

What is wrong with one is a ``ValueError`` in one line; the caller knows what the file is, and what would be right.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

# A model's config has kilobytes, a tokenizer's settings a few megabytes.
LARGEST_JSON = 16 << 20
# The longest config that makes sense lists a thousand sources; the parser takes a second for as much.
LARGEST_SETTINGS = 1 << 18
# No real settings are nested deeper. Python itself gives up at about a thousand.
DEEPEST = 100
# Beyond what such a file can hold, but not beyond what a few anchors of YAML can stand for.
MOST_VALUES = 2_000_000
# ``a.b.c…``: the parser takes hours for one of a hundred thousand parts.
_LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST},}}+""")


def read_bytes(path: Path, most: int = LARGEST_JSON) -> bytes:
    """A file's content; no more of it is read than it may have, whatever its size is said to be."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is longer than {_size(most)}")
    return content


def read_json(path: Path, most: int = LARGEST_JSON) -> Any:
    return parse_json(read_bytes(path, most))


def parse_json(content: bytes | str) -> Any:
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    check_plain(value)
    return value


def first_fault(error: ValidationError) -> str:
    """What pydantic finds wrong first, in one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else first["msg"]


def read_settings(path: Path) -> str:
    """The text of a file that a person wrote: TOML, YAML."""
    # Some editors begin a file with a mark.
    return read_bytes(path, LARGEST_SETTINGS).decode("utf-8-sig")


def parse_toml(text: str) -> dict[str, Any]:
    if _LONG_KEY.search(text):
        raise ValueError(f"a key in it has more than {DEEPEST} parts")
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    check_plain(value)
    return value


def check_plain(value: Any) -> None:
    """Refuse what no recursion could walk through: too deep, or (in YAML) a few bytes that stand for billions."""
    here, depth, seen = [value], 0, 0
    while here:
        depth, seen = depth + 1, seen + len(here)
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
        if seen > MOST_VALUES:
            raise ValueError(f"it stands for more than {MOST_VALUES:,} values")
        inner = (
            one.values() if isinstance(one, dict) else one for one in here if isinstance(one, (dict, list))
        )
        here = [value for values in inner for value in values if isinstance(value, (dict, list))]


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
