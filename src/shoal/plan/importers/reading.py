"""Read each value of an imported file once; whatever is left has no counterpart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.facts.config.check import shorten
from shoal.facts.problem import Problem

# Values that say nothing: a table left empty, a switch left off, a count of 0.
_SILENT: tuple[object, ...] = (None, {}, [], "", False, "no", "none")
_LARGEST = 10**18


class Reading:
    """Values by dotted key, such as ``zero_optimization.stage``; notes on what they became; what is wrong with them.

    A value that is not there, or is "auto" and so the script's to decide, reads as None; ``absent`` is what it means
    to leave a key out.
    """

    def __init__(self, values: dict[str, Any], source: str, problems: list[Problem] | None = None) -> None:
        self.source = source
        self.notes: list[str] = []
        self.problems: list[Problem] = [] if problems is None else problems
        self._values = dict(_flat(values))

    def has(self, key: str) -> bool:
        """Whether a table of that name was given."""
        return any(known.startswith(f"{key}.") for known in self._values)

    def number(self, key: str, absent: float | None = None) -> float | None:
        value: float | None = self._take(key, absent)
        if isinstance(value, str):
            value = _as_number(value)  # YAML takes 1e-5 for text
        if value is not None and not _is_number(value):
            self._refuse(key, value, "a number")
            return None
        return value

    def count(self, key: str, absent: int | None = None) -> int | None:
        """A whole number from 0 on; DeepSpeed's own files write some as 5e8."""
        value = self.number(key, absent)
        if value is None:
            return None
        if value < 0 or not float(value).is_integer():
            self._refuse(key, value, "a whole number from 0 on")
            return None
        return int(value)

    def switch(self, key: str) -> bool | None:
        value = self._take(key)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if value is not None and not isinstance(value, bool):
            self._refuse(key, value, "true or false")
            return None
        return value

    def word(self, key: str) -> str | None:
        value = self._take(key)
        return None if value is None else str(value)

    def pair(self, key: str, absent: tuple[float, float]) -> tuple[float, float] | None:
        value = self._take(key, absent)
        if value is None:
            return None
        if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value)):
            return float(value[0]), float(value[1])
        self._refuse(key, value, "a list of 2 numbers")
        return None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def left(self) -> list[str]:
        """A note for everything that was never taken."""
        return [
            f"{key} = {shorten(repr(value))}: no counterpart, left out"
            for key, value in self._values.items()
            if not any(value is silent or value == silent for silent in _SILENT)
        ]

    def _take(self, key: str, absent: Any = None) -> Any:
        value = self._values.pop(key, absent)
        if value == "auto":
            self.note(f'{key} = "auto": there the script decides; here Shoal\'s default holds')
            return None
        return value

    def _refuse(self, key: str, value: object, must: str) -> None:
        what = f"{self.source}: {key} = {shorten(repr(value))}: must be {must}"
        self.problems.append(Problem(what, f"correct {key} there"))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_number(value: object) -> bool:
    """A number that a setting can have: neither true or false, nor infinite, nor beyond every size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
