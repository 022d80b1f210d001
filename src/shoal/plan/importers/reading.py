"""Read each value of an imported file once; whatever remains has no counterpart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal.facts.config.check import shorten
from shoal.facts.problem import Problem

# Values that say nothing: an empty table, a switch that is off, a count of 0.
_SILENT: tuple[object, ...] = (None, {}, [], "", False, "no", "none")
_LARGEST = 10**18


class Unknown(str):
    """An expression or a variable in place of a value. Nothing is executed to find out more."""


class Reading:
    """Values by dotted key, such as ``zero_optimization.stage``; notes on their conversion; and problems with them.

    A missing value, or "auto", which leaves it to the script, reads as None; ``absent`` is the default of a missing
    key. ``spell`` is how the file writes a key.
    """

    def __init__(
        self,
        values: dict[str, Any],
        source: str,
        problems: list[Problem] | None = None,
        spell: Callable[[str], str] = str,
    ) -> None:
        self.source = source
        self.spell = spell
        self.notes: list[str] = []
        self.problems: list[Problem] = [] if problems is None else problems
        self._values = dict(_flat(values))

    def fill(self, values: dict[str, Any]) -> None:
        """Substitute values for each "auto"; None leaves it as is."""
        for key, value in values.items():
            if self._values.get(key) == "auto" and value is not None:
                self._values[key] = value

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

    def degree(self, key: str) -> int:
        """A parallel degree; 1 if not given. A layout is never guessed."""
        value = self._values.get(key)
        if isinstance(value, Unknown) or value == "auto":
            self._refuse(key, self._values.pop(key), "a number: the layout depends on it")
            return 1
        return self.count(key) or 1

    def flag(self, key: str) -> bool:
        """Whether a switch is on."""
        return bool(self.switch(key))

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

    def items(self, key: str) -> list[Any] | None:
        value = self._take(key)
        return None if value is None else _listed(value)

    def numbers(self, key: str) -> list[float] | None:
        """A list of numbers, or a single one."""
        value = self._take(key)
        if value is None:
            return None
        items = [_as_number(one) if isinstance(one, str) else one for one in _listed(value)]
        if all(map(_is_number, items)):
            return [float(one) for one in items]
        self._refuse(key, value, "a list of numbers")
        return None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def left(self) -> list[str]:
        """A note for every value that was never read."""
        return [
            f"{self.spell(key)}{_shown(value)}: no counterpart, left out"
            for key, value in self._values.items()
            if not any(value is silent or value == silent for silent in _SILENT)
        ]

    def drop(self, key: str) -> bool:
        """Whether it was given, whatever its value."""
        return self._values.pop(key, None) is not None

    def skip(self, *keys: str) -> None:
        """Mark keys that Shoal handles its own way, so that nothing is lost with them."""
        for key in keys:
            self._values.pop(key, None)

    def _take(self, key: str, absent: Any = None) -> Any:
        value = self._values.pop(key, absent)
        if isinstance(value, Unknown):
            self.note(
                f"{self.spell(key)} = {shorten(value)}: the file does not hold its value; Shoal's default holds"
            )
            return None
        if value == "auto":
            self.note(f'{self.spell(key)} = "auto": there the script decides; here Shoal\'s default holds')
            return None
        return value

    def _refuse(self, key: str, value: object, must: str) -> None:
        what = f"{self.source}: {self.spell(key)}{_shown(value)}: must be {must}"
        self.problems.append(Problem(what, f"correct {self.spell(key)} there"))


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _shown(value: object) -> str:
    """The value as shown in a note."""
    return f" = {shorten(value if isinstance(value, Unknown) else repr(value))}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_number(value: object) -> bool:
    """Whether it is a usable number: not a boolean, not infinite, not absurdly large."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
