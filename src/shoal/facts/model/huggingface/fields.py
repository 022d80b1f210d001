"""Typed look-ups in an untrusted JSON object; collects all problems before reporting them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.facts.input.untrusted_files import read_json
from shoal.facts.model import WIDEST
from shoal.facts.problem import BadInput, Problem, did_you_mean, shorten

LARGEST_NUMBER = 1e15
LONGEST_VALUE = 200  # quoted in messages

REQUIRED: Any = object()  # as a default: the key is required


def load(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = read_json(path)
    except OSError as error:
        raise BadInput(
            f"cannot read {path}: {error.strerror}", "check the path and its permissions"
        ) from error
    except ValueError as error:
        raise BadInput(
            f"{path} cannot be read as JSON: {error}",
            "was it downloaded whole? A model's config.json has kilobytes",
        ) from error
    if not isinstance(content, dict):
        raise BadInput(
            f"{path} holds {type(content).__name__}, not a JSON object", "was it downloaded whole?"
        )
    return content


class Fields:
    """The keys of one object. A wrong value is recorded, and a placeholder of the right type returned."""

    def __init__(self, values: Mapping[str, Any], where: str, problems: list[Problem] | None = None) -> None:
        self.values = values
        self.where = where
        self.problems: list[Problem] = [] if problems is None else problems
        self.contradictions: list[Problem] = []

    def problem(self, what: str, fix: str = "") -> None:
        self.problems.append(Problem(f"{self.where}: {shorten(what, LONGEST_VALUE)}", fix))

    def check(self, holds: bool, what: str, fix: str = "") -> None:
        """Record a contradiction between values."""
        if not holds:
            self.contradictions.append(Problem(f"{self.where}: {shorten(what, LONGEST_VALUE)}", fix))

    def raise_problems(self) -> None:
        # If there are wrong values, contradictions would mislead, since placeholders took part in the comparisons.
        told = dict.fromkeys(self.problems or self.contradictions)  # a key may be read twice
        if told:
            raise BadInput(tuple(told))

    def has(self, *keys: str) -> bool:
        return any(key in self.values for key in keys)

    def look(self, keys: str | tuple[str, ...], default: Any = REQUIRED) -> Any:
        """The value under any of several spellings, which must agree."""
        spellings = (keys,) if isinstance(keys, str) else keys
        written = [key for key in spellings if key in self.values]
        if not written:
            if default is REQUIRED:
                self.problem(f"{spellings[0]} is missing", "a model's sizes are never guessed: add it")
            return default
        value = self.values[written[0]]
        for other in written[1:]:
            if self.values[other] != value:
                self.problem(
                    f"{written[0]} is {value!r} and {other} is {self.values[other]!r}",
                    "they mean the same: keep one",
                )
        return value

    def whole(
        self, keys: str | tuple[str, ...], default: Any = REQUIRED, least: int = 1, most: int = WIDEST
    ) -> int:
        value = self.look(keys, default)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        if value is not REQUIRED:
            self._wrong(keys, value, f"a whole number of at least {least} and at most {most}")
        return max(least, 1)

    def optional_whole(
        self, keys: str | tuple[str, ...], default: int | None, most: int = WIDEST
    ) -> int | None:
        """Like ``whole``, but ``null`` is a valid value."""
        if self.look(keys, default) is None:
            return None
        return self.whole(keys, default, most=most)

    def number(
        self, keys: str | tuple[str, ...], default: Any = REQUIRED, least: float | None = None
    ) -> float:
        """A finite number; positive unless a minimum is given."""
        value = self.look(keys, default)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        # NaN fails every comparison.
        if numeric and value <= LARGEST_NUMBER and (value > 0 if least is None else value >= least):
            return float(value)
        if value is not REQUIRED:
            self._wrong(
                keys,
                value,
                f"a number above 0, at most {LARGEST_NUMBER:g}"
                if least is None
                else f"a number of at least {least:g}, at most {LARGEST_NUMBER:g}",
            )
        return 1.0

    def optional_number(
        self, key: str, default: float | None = None, least: float | None = None
    ) -> float | None:
        """Like ``number``, but ``null`` is a valid value."""
        return None if self.values.get(key, default) is None else self.number(key, default, least)

    def flag(self, key: str, default: bool) -> bool:
        value = self.look(key, default)
        if isinstance(value, bool):
            return value
        self._wrong(key, value, "true or false")
        return default

    def choice(self, key: str, default: str, meanings: Mapping[str, str]) -> str:
        value = self.look(key, default)
        if isinstance(value, str) and value in meanings:
            return meanings[value]
        self.problem(f"{key} {value!r} is not supported", did_you_mean(str(value), meanings))
        return meanings[default]

    def items(self, key: str) -> list[Any] | None:
        """A list; None if absent or ``null``."""
        value = self.values.get(key)
        if value is None or isinstance(value, list):
            return value
        self._wrong(key, value, "a list")
        return None

    def _wrong(self, keys: str | tuple[str, ...], value: object, expected: str) -> None:
        spellings = (keys,) if isinstance(keys, str) else keys
        written = next((key for key in spellings if key in self.values), spellings[0])
        self.problem(f"{written} is {value!r}", f"it must be {expected}")
