"""Write a config with every key: values that are set, and all others commented out at their defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from shoal.facts.config import describe
from shoal.facts.config.check import toml_value
from shoal.facts.config.file import template
from shoal.facts.problem import Problem
from shoal.facts.unsupported_keys import unsupported_keys

_NOTHING: Any = object()


def commented(tables: dict[str, Any], head: Iterable[str] = (), refused: Iterable[Problem] = ()) -> str:
    """The text of a config. ``head``: lines at its top. ``refused``: what the engine will reject as is.

    Keys and values that this version does not run are marked.
    """
    lines = [f"# {one_line(line)}".rstrip() for line in head]
    problems = list(refused)
    lines += [f"# REFUSED: {one_line(one.what)}; {one_line(one.fix)}" for one in problems]
    first, *others = template().splitlines()
    lines = [*(lines or [first])]
    section = ""
    for line in others:
        if header := re.fullmatch(r"\[(.+)\]", line):
            section = f"{header[1]}."
        name = re.match(r"# (\w+) =", line)
        if name:
            line = _line(section + name[1], name[1], _look(tables, section + name[1]), line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _line(key: str, name: str, value: Any, default: str) -> str:
    if value is not _NOTHING:
        default = f"{name} = {toml_value(value)}"
        default = f"{default:<38} # {describe(key)}"
    unrun = unsupported_keys().get(key)
    if unrun is None:
        return default
    return f"{default} [NOT YET: this version does not run {unrun or 'it'}]"


def _look(tables: dict[str, Any], key: str) -> Any:
    """The value set under a dotted key."""
    found: Any = tables
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            return _NOTHING
        found = found[name]
    return found


def one_line(text: str) -> str:
    """Make text safe for a one-line comment."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
