"""Of many cases that take seconds each, some for ``make test``; the others are ``long``, which CI runs too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], keep: int, one: bool = False) -> list[Any]:
    """Every ``keep``-th as it is, the others marked. A list should be so ordered that these cover what differs.

    ``one``: a case is one argument, even if it is a tuple.
    """
    values = [case if isinstance(case, tuple) and not one else (case,) for case in cases]
    marks = [() if number % keep == 0 else pytest.mark.long for number in range(len(values))]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]
