"""The rows of metrics.jsonl as columns, and thinning them without changing how a curve looks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, TypeGuard

# Stretches of steps that the experts' load is summed over; twice as many at most.
STRETCHES = 48
# The first steps of a process create states and load kernels; typical values exclude them.
WARM_UP = 3


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number; JSON's true is not, although it is one in Python."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class Columns:
    """One list per field; None where a row has no value, or a non-finite one."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.layouts: list[str | None] = []
        self.attempts: list[str | None] = []
        self.numbers: dict[str, list[float | None]] = {}
        self.validation: dict[str, list[tuple[int, float]]] = {}  # per set: (index of the row, loss)
        self.experts: list[
            tuple[int, int, list[float]]
        ] = []  # first and last step of a stretch, tokens per expert
        self.compared: dict[str, Any] = {}  # how the first steps compared with the plan
        self.in_order = True
        self.ended_early = False
        self._per_stretch = 1
        self._in_stretch = 0

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, row: Any) -> bool:
        """Add a row; returns whether it belongs to a step."""
        if not isinstance(row, dict) or not is_number(row.get("step")):
            return False
        step, place = int(row["step"]), len(self.steps)
        if self.steps and step <= self.steps[-1]:
            self.in_order = False
        self.steps.append(step)
        self.layouts.append(row["layout"] if isinstance(row.get("layout"), str) else None)
        self.attempts.append(row["attempt"] if isinstance(row.get("attempt"), str) else None)
        for name, value in row.items():
            if isinstance(value, (int, float)) and name != "step" and is_number(value):
                column = self.numbers.get(name)
                if column is None:
                    column = self.numbers[name] = []
                if len(column) < place:
                    column.extend([None] * (place - len(column)))
                column.append(value)
        others = row.get("validation")
        for name, value in others.items() if isinstance(others, dict) else ():
            if is_number(value):
                self.validation.setdefault(str(name), []).append((place, float(value)))
        if isinstance(row.get("compared"), dict):
            self.compared = row["compared"]
        self.ended_early = row.get("ended_early") is True
        self._add_experts(step, row.get("expert_load"))
        return True

    def _add_experts(self, step: int, load: Any) -> None:
        if not isinstance(load, list) or not load or not all(map(is_number, load)):
            return
        last = self.experts[-1] if self.experts else None
        if last is not None and self._in_stretch < self._per_stretch and len(last[2]) == len(load):
            total = [one + other for one, other in zip(last[2], load, strict=True)]
            self.experts[-1] = (last[0], step, total)
            self._in_stretch += 1
            return
        self.experts.append((step, step, [float(one) for one in load]))
        self._in_stretch = 1
        if len(self.experts) > 2 * STRETCHES:
            self.experts = [
                _merged(self.experts[place : place + 2]) for place in range(0, len(self.experts), 2)
            ]
            self._per_stretch *= 2

    def sort(self) -> None:
        """Each step once, in order: its last row counts."""
        self.in_order = True
        places = sorted({step: place for place, step in enumerate(self.steps)}.items())
        kept = [place for _, place in places]
        numbers = {name: self._whole(name) for name in self.numbers}
        moved = {place: new for new, place in enumerate(kept)}
        self.steps = [self.steps[place] for place in kept]
        self.layouts = [self.layouts[place] for place in kept]
        self.attempts = [self.attempts[place] for place in kept]
        self.numbers = {name: [column[place] for place in kept] for name, column in numbers.items()}
        self.validation = {
            name: sorted((moved[place], value) for place, value in found if place in moved)
            for name, found in self.validation.items()
        }

    def _whole(self, name: str) -> list[float | None]:
        column, total = self.numbers.get(name, []), len(self.steps)
        return column if len(column) == total else [*column, *[None] * (total - len(column))]

    def column(self, name: str) -> list[float | None]:
        """One entry per row."""
        return self._whole(name)

    def values(self, name: str) -> list[float]:
        """Existing values only."""
        return [value for value in self.numbers.get(name, ()) if value is not None]

    def usual(self, name: str) -> float | None:
        """The median, without the first steps."""
        values = [value for value in self.column(name)[WARM_UP:] if value is not None] or self.values(name)
        return median(values) if values else None

    def last(self, name: str) -> float | None:
        found = self.values(name)
        return found[-1] if found else None

    def hours(self) -> list[float]:
        """Cumulative hours of steps, from the first row on: evaluations, commits and restarts are not included."""
        total, found = 0.0, []
        for seconds in self.column("step_s"):
            total += seconds or 0.0
            found.append(total / 3600)
        return found


def _merged(pair: Sequence[tuple[int, int, list[float]]]) -> tuple[int, int, list[float]]:
    if len(pair) == 1 or len(pair[0][2]) != len(pair[1][2]):
        return pair[0]
    return pair[0][0], pair[1][1], [one + other for one, other in zip(pair[0][2], pair[1][2], strict=True)]


def thinned(column: Sequence[float | None], buckets: int, always: Iterable[int] = ()) -> list[int]:
    """Indices whose values look like the whole column at this resolution: the minimum and maximum of each bucket,
    the first and last of all, and those in ``always``. A spike of one step in a million is kept.
    """
    total = len(column)
    if total <= 2 * buckets:
        return [place for place, value in enumerate(column) if value is not None]
    kept = {place for place in always if 0 <= place < total and column[place] is not None}
    for bucket in range(buckets):
        low = high = None
        least, most = math.inf, -math.inf
        for place in range(bucket * total // buckets, (bucket + 1) * total // buckets):
            value = column[place]
            if value is None:
                continue
            if value < least:
                least, low = value, place
            if value > most:
                most, high = value, place
        kept.update(place for place in (low, high) if place is not None)
    ends = [place for place, value in enumerate(column) if value is not None]
    kept.update(ends[:1] + ends[-1:])
    return sorted(kept)


def medians(column: Sequence[float | None], buckets: int) -> list[int]:
    """For each bucket the index of its median value: a real row, so the curve shows where most values lie."""
    total, kept = len(column), []
    for bucket in range(buckets):
        places = range(bucket * total // buckets, (bucket + 1) * total // buckets)
        found = sorted((value, place) for place in places if (value := column[place]) is not None)
        if found:
            kept.append(found[len(found) // 2][1])
    return sorted(kept)


def rounded(value: float | None, digits: int = 6) -> float | int | None:
    """As short as a picture needs it."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
