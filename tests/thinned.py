"""Of many cases that take seconds each, some for ``make test``, as many again ``long``, which CI runs too.

All the others are ``full``: ``make test-full`` runs every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], keep: int, one: bool = False) -> list[Any]:
    """Every ``keep``-th as it is, the others marked. A list should be so ordered that these cover what differs.

    ``one``: a case is one argument, even if it is a tuple.
    """
    values = [case if isinstance(case, tuple) and not one else (case,) for case in cases]
    marks = [_mark(number, keep) for number in range(len(values))]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]


def rest(cases: Iterable[Any], quick: Callable[[Any], bool], keep: int = 2) -> list[Any]:
    """The quick ones as they are; of the others every ``keep``-th is ``long`` and the rest ``full``."""
    found, others = [], 0
    for case in cases:
        marks: Any = ()
        if not quick(case):
            marks = pytest.mark.long if others % keep == 0 else pytest.mark.full
            others += 1
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=marks, id="-".join(map(str, values))))
    return found


def _mark(number: int, keep: int) -> tuple[()] | pytest.MarkDecorator:
    """Of what is not kept, every other case is long where few are left out, and one of those between else."""
    round_, place = divmod(number, keep)
    if place == 0:
        return ()
    taken = round_ % 2 == 0 if keep == 2 else place == keep // 2
    return pytest.mark.long if taken else pytest.mark.full
