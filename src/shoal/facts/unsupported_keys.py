"""Config keys and values that the engine rejects in any combination, found by trying them.

When the engine learns one of them (``facts/support.py``, ``facts/strategies.py``), nothing changes here.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from shoal.facts import strategies, support
from shoal.facts.config import Config, find_field, table_of, type_of
from shoal.facts.config.file import flatten
from shoal.facts.layout import Layout


@cache
def unsupported_keys() -> dict[str, str]:
    """By dotted key: the values that are not supported; empty if none of the key is."""
    marks: dict[str, str] = {}
    for key in flatten(Config()):
        field = find_field(key)
        refused = [value for value in _values(field) if _is_refused(key, value)] if field else []
        if refused:
            marks[key] = ", ".join(f'"{value}"' for value in refused if isinstance(value, str))
    if parts := list(_of_layouts()):
        marks["layout"] = ", ".join(parts)
    return marks


def _values(field: FieldInfo) -> Iterator[Any]:
    """Possible values of a key, one at a time."""
    kind, table = type_of(field), table_of(field)
    if kind is bool:
        yield True
    elif table is not None:
        yield {}
    else:
        yield from (choice for choice in typing.get_args(kind) if isinstance(choice, str))


def _is_refused(key: str, value: Any) -> bool:
    """Whether this alone is rejected, not a combination of settings."""
    section, _, name = key.rpartition(".")
    given = {name: value} if value != {} else {name: {}}
    try:
        config = Config.model_validate({section: given} if section else given)
    except ValidationError:
        return False
    shown = f'{key} = "{value}"' if isinstance(value, str) else key
    return any(problem.what.startswith(f"{shown}: ") for problem in support.missing(config, None, Layout()))


def _of_layouts() -> Iterator[str]:
    for one in strategies.STRATEGIES:
        if not one.file:
            yield one.key
        else:
            yield from (f"{one.key}={part}" for part in one.unrun)
