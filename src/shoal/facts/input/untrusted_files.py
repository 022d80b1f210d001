"""Read untrusted JSON and TOML within limits on size, depth and content.

Errors are a one-line ``ValueError``; the caller knows what the file is and how to fix it.
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
# The longest sensible config lists a thousand sources; parsing that takes a second.
LARGEST_SETTINGS = 1 << 18
# No real settings are nested deeper. Python itself fails at about a thousand.
DEEPEST = 100
# More than such a file can contain, but not more than a few YAML anchors can expand to.
MOST_VALUES = 2_000_000
# ``a.b.c…``: the parser takes hours for a hundred thousand parts.
_LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST},}}+""")


def read_bytes(path: Path, most: int = LARGEST_JSON) -> bytes:
    """A file's content, reading no more than the limit, whatever size the file claims."""
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
    """pydantic's first error, in one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else first["msg"]


def read_settings(path: Path) -> str:
    """The text of a file written by a person: TOML, YAML."""
    # Some editors write a byte order mark.
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
    """Reject values that recursion cannot handle: too deep or, in YAML, a few bytes that expand to billions."""
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
