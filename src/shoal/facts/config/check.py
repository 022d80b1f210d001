"""Error messages for bad config values, each with its fix."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shoal.facts import problem
from shoal.facts.config import Config, describe, find_field, item_of, table_of, type_of
from shoal.facts.input.foreign_terms import BESIDE, LATER, VALUES, Meaning, layout_pair, meaning
from shoal.facts.layout import READERS
from shoal.facts.problem import Problem, closest, did_you_mean
from shoal.facts.redact import holds_password, redact

# pydantic's error types for our schema, in our words.
_MUST = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": 'must be text, in "quotes"',
    "string_unicode": "must be text in UTF-8",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "missing": "lacks a key",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "value_error": "{error}",
}
_LONGEST_VALUE = 60
# Values written here by mistake may be secrets: NAME=value, a URL with a key.
_NOT_QUOTED = ("run.environment", "checkpoint.to")
# Names that are ambiguous without their table: data.path is not model.path.
COMMON = {"path", "name", "dir", "to", "on", "memory", "enabled", "source", "field", "keep"}


def place_of(places: dict[str, str], key: str) -> str:
    """Where a value was written: at its key, within it (as in ``recipe.lr = 1``), or at an enclosing table."""
    inside = (place for known, place in places.items() if known.startswith(key + "."))
    place = places.get(key) or next(inside, "")
    table = key.rpartition(".")[0]
    return place or (place_of(places, table) if table else "")


def remove_unknown(
    values: dict[str, Any], places: dict[str, str], schema: type[BaseModel] = Config, prefix: str = ""
) -> list[Problem]:
    """Remove and report every key that is not in the schema, so that the rest can be checked further."""
    problems = []
    for name in list(values):
        key = prefix + name
        field = schema.model_fields.get(name)
        if field is None:
            problems.extend(_unknown(key, values.pop(name), schema, places))
        elif (table := table_of(field)) and isinstance(values[name], dict):
            problems.extend(remove_unknown(values[name], places, table, key + "."))
        elif (item := item_of(field)) and isinstance(values[name], list):
            for number, one in enumerate(values[name]):
                if isinstance(one, dict):
                    problems.extend(remove_unknown(one, places, item, f"{key}.{number}."))
    return problems


def refuse_passwords(flat: dict[str, Any], places: dict[str, str]) -> list[Problem]:
    """Reject credentials: a config is copied, shown and stored with its run."""
    return [
        _placed(
            places,
            key,
            f"{key}: a URL in it holds a password or a signature",
            "leave it out: credentials are taken from the environment; see docs/security.md",
        )
        for key, value in flat.items()
        if any(map(holds_password, _texts(value)))
    ]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _unknown(key: str, value: Any, schema: type[BaseModel], places: dict[str, str]) -> list[Problem]:
    """Report an unknown key; for a whole table of another tool, every key that has a counterpart."""
    outer, _, name = key.rpartition(".")
    if outer.rpartition(".")[2].isdecimal():  # in a list of tables, whose keys are separate
        other = (meaning(name) or Meaning()).key.rpartition(".")[2]
        word = other if other in schema.model_fields else name
        fix = did_you_mean(word, schema.model_fields)
        return [_placed(places, key, f"{outer}: unknown key {name!r}", fix)]
    if name and isinstance(value, dict) and key not in LATER and closest(name, schema.model_fields) is None:
        inner = {f"{key}.{word}": _known_elsewhere(f"{key}.{word}", of) for word, of in value.items()}
        answers = [_placed(places, one, f"unknown key {one!r}", fix) for one, fix in inner.items() if fix]
        if answers:
            return answers
    fix = _known_elsewhere(key, value) or _likely(key, schema)
    return [_placed(places, key, f"unknown key {key!r}", fix)]


def _known_elsewhere(key: str, value: Any) -> str:
    """The counterpart of a name in a later version, another tool, a layout or another table; empty if none."""
    if key in LATER:
        return f"not yet: {LATER[key]}"
    name = key.rpartition(".")[2]
    known = meaning(key) or (
        Meaning(layout=name) if name in READERS and find_field(f"recipe.{name}") is None else None
    )
    if known is not None and known.layout:
        pair, beside = layout_pair(known.layout, value), BESIDE.get(known.layout, "")
        return f'it is {known.layout} of the layout here: layout = "{pair}"{beside}'
    if known is not None:
        return known.sentence or f"it is {known.key} here: {describe(known.key)}"
    # The same key in another table is the commonest mistake, unless the name is ambiguous.
    elsewhere = keys_called(name)
    return f"did you mean {' or '.join(map(repr, elsewhere))}?" if elsewhere else ""


def keys_called(name: str) -> list[str]:
    """Every key of that name in any table; none if it is ambiguous without its table."""
    return [] if name in COMMON else [key for key in _keys(Config) if key.rpartition(".")[2] == name]


def _likely(key: str, schema: type[BaseModel]) -> str:
    prefix, dot, name = key.rpartition(".")
    near = closest(name, schema.model_fields)
    if near is not None:
        return f"did you mean {prefix + dot + near!r}?"
    slip = closest(name, {other.rpartition(".")[2] for other in _keys(Config)} - COMMON)
    return (_known_elsewhere(slip, None) if slip else "") or did_you_mean(name, schema.model_fields)


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield prefix + name
        if table := table_of(field):
            yield from _keys(table, f"{prefix}{name}.")


def explain(error: ValidationError, places: dict[str, str]) -> list[Problem]:
    """For every rejected value: where it was written, what it must be, and what it means."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors():
        by_key.setdefault(_key(detail["loc"]), []).append(detail)
    return [_placed(places, key, *_refused(key, details)) for key, details in by_key.items()]


def _key(location: tuple[int | str, ...]) -> str:
    """The dotted key of a pydantic location, which also contains the union branch that was tried."""
    key = ""
    for part in location:
        longer = f"{key}.{part}" if key else str(part)
        if not isinstance(part, int) and find_field(longer) is None:
            break
        key = longer
    return key


def _refused(key: str, details: list[ErrorDetails]) -> tuple[str, str]:
    """What is wrong with a value, and its fix."""
    detail, field = details[0], find_field(key)
    given = detail["input"]
    if len(details) > 1:
        must = "has a type that it cannot have"  # a union whose branches all failed
    else:
        ours = _MUST.get(detail["type"])
        must = ours.format(**detail.get("ctx", {})) if ours else detail["msg"]
    shown = (
        "" if isinstance(given, dict) or key in _NOT_QUOTED else f" = {shorten(redact(toml_value(given)))}"
    )
    what = f"{key}{shown}: {must}"
    if detail["type"] == "missing":
        outer, _, name = key.rpartition(".")
        return f"{outer}: the key {name!r} is missing", f"{name}: {describe(key)}"
    if field is None:
        return what, "shoal config show lists every key with its meaning"
    choices = [str(choice) for choice in typing.get_args(type_of(field)) if isinstance(choice, str)]
    meant = closest(given, choices) if isinstance(given, str) else None
    if isinstance(given, str) and (word := VALUES.get(given.lower(), "")) in choices:
        meant = word
    if key == "layout" and isinstance(given, dict):
        return what, 'layout = "{}"'.format(",".join(f"{name}={value}" for name, value in given.items()))
    if meant:
        return what, f'{key} = "{meant}"'
    table = table_of(field)
    if table is not None and detail["type"] == "value_error":
        # Values that are valid alone and contradict each other: report only those.
        named = [f"{key}.{name}" for name in table.model_fields if re.search(rf"\b{name} = ", must)]
        if len(named) > 1:
            return what, f"keep one: {' or '.join(named)}"
        known = must.rpartition(": ")[2]
        if named and known.startswith('"'):
            return what, f"{named[0]} = {known}"
    if table is not None:
        return what, f"[{key}] holds {', '.join(table.model_fields)}"
    without = field.default is None or field.is_required()
    default = "" if without else f" (default {toml_value(field.default)})"
    return what, f"{key}: {describe(key)}{default}"


def _placed(places: dict[str, str], key: str, what: str, fix: str) -> Problem:
    """A problem with a value, located where that was written."""
    place = place_of(places, key)
    return Problem(f"{place}: {what}" if place else what, fix, where_of(place, key))


def where_of(place: str, key: str) -> str | None:
    """A machine-readable location: which of several ``--set``; None if the value is a default."""
    return f"{place} {key}" if place == "--set" else place or None


def toml_value(value: Any) -> str:
    """A value as one line of TOML."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{name} = {toml_value(inner)}" for name, inner in value.items())
        return "{" + ", ".join(pairs) + "}"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def shorten(text: str) -> str:
    return problem.shorten(text, _LONGEST_VALUE)
