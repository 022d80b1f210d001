"""Output shared by commands: JSON, columns, plurals."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.facts.problem import Problem

if TYPE_CHECKING:
    from shoal.facts.cluster import Cluster
    from shoal.facts.model import Model


def print_json(document: Any) -> None:
    """Print one JSON document on standard output, and nothing else there."""
    # All or nothing.
    sys.stdout.write(json.dumps(_plain(document), indent=2, default=str, allow_nan=False) + "\n")


def print_problems(problems: Iterable[Problem], code: int) -> None:
    """Print problems in place of the answer for ``--json``."""
    rows = [{"what": one.what, "fix": one.fix, "where": one.where or _flag(one.what)} for one in problems]
    print_json({"ok": False, "exit_code": code, "problems": rows})


def _flag(what: str) -> str | None:
    """The flag at the beginning of a message, if there is one."""
    found = re.match(r"--[a-z][a-z-]*", what)
    return found[0] if found else None


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: such a loss becomes null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def warn_of_length(model: Model, seq: int) -> None:
    """Warn on standard error if rows are longer than the model was made for."""
    from shoal.facts.layout.legality import beyond_positions

    if warning := beyond_positions(model, seq):
        print(f"warning: {warning}", file=sys.stderr)


def counted(count: int, noun: str) -> str:
    """``1 layout``, ``9 layouts``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """Print aligned columns of plain text, never wrapped or cut, so that the output can be searched and piped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


# Width of tables and paragraphs if the output is not a terminal and COLUMNS is not set.
PIPED = 120


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((PIPED, 24)).columns


def print_wrapped(text: str, indent: str = "") -> None:
    """Print a wrapped paragraph. Words are not broken, so that a layout stays in one piece."""
    print(
        textwrap.fill(text, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )


def print_fitted(rows: Sequence[tuple[str, ...]], arrangements: Sequence[Sequence[Sequence[int]]]) -> None:
    """Print aligned columns in the first arrangement that fits the terminal, or else in the last.

    An arrangement lists, for each line of a row, the columns on it. With several lines the first is a name of any
    length: only the others have to fit.
    """
    for arrangement in arrangements:
        lines = _lines(rows, arrangement)
        numbers = (
            line for place, line in enumerate(lines) if len(arrangement) == 1 or place % len(arrangement)
        )
        if max(map(len, numbers)) <= width():
            break
    print("\n".join(lines))


def _lines(rows: Sequence[tuple[str, ...]], arrangement: Sequence[Sequence[int]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        for place, columns in enumerate(arrangement):
            # A cell alone on its line is not aligned.
            cells = (row[each].ljust(widths[each] if len(columns) > 1 else 0) for each in columns)
            lines.append(("   " if place else "") + "  ".join(cells).rstrip())
    return lines


def unwritable(paths: Iterable[Path]) -> Iterator[Problem]:
    """Reasons why output could not be written, checked before the work begins: a typo must not cost an hour."""
    for path in paths:
        if not path.parent.is_dir():
            yield Problem(
                f"cannot write {path}: there is no directory {path.parent}", "a directory that exists"
            )
        elif path.is_dir():
            yield Problem(f"cannot write {path}: it is a directory", "name a file in it")


def use_calibration(wanted: bool = True) -> None:
    """Call before anything is predicted. An unusable file gives a warning with a fix."""
    from shoal.facts.calibration import file

    folder = file.default_folder() if wanted else None
    for warning in file.use(folder):
        print(f"warning: {warning}", file=sys.stderr)


def measured_rates(cluster: Cluster) -> str | None:
    """One line for the user; None if nothing was measured."""
    from shoal.facts import calibration

    found = calibration.find(cluster)
    if found.measured is None and not found.links:
        return None
    return f"rates: {found.words}; --no-calibration ignores them"
