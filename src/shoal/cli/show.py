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
    """One JSON document on standard output, and nothing else there."""
    # Whole or not at all.
    sys.stdout.write(json.dumps(_plain(document), indent=2, default=str, allow_nan=False) + "\n")


def print_problems(problems: Iterable[Problem], code: int) -> None:
    """What ``--json`` says in place of an answer."""
    rows = [{"what": one.what, "fix": one.fix, "where": one.where or _flag(one.what)} for one in problems]
    print_json({"ok": False, "exit_code": code, "problems": rows})


def _flag(what: str) -> str | None:
    """A message about a flag begins with it."""
    found = re.match(r"--[a-z][a-z-]*", what)
    return found[0] if found else None


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: a loss that is one of them becomes null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def warn_of_length(model: Model, seq: int) -> None:
    """On standard error, where rows are longer than what the model was made for."""
    from shoal.facts.layout.legality import beyond_positions

    if warning := beyond_positions(model, seq):
        print(f"warning: {warning}", file=sys.stderr)


def counted(count: int, noun: str) -> str:
    """``1 layout``, ``9 layouts``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """Aligned columns of plain text: nothing is wrapped or cut, so the output can be searched and piped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


# Of a table or a paragraph where the output is no terminal and COLUMNS is not set.
PIPED = 120


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((PIPED, 24)).columns


def print_wrapped(text: str, indent: str = "") -> None:
    """A paragraph of as many lines as it takes. No word is broken, so that a layout stays in one piece."""
    print(
        textwrap.fill(text, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )


def print_fitted(rows: Sequence[tuple[str, ...]], arrangements: Sequence[Sequence[Sequence[int]]]) -> None:
    """Aligned columns in the first arrangement that the terminal is wide enough for, or else in the last.

    An arrangement has, for each line of a row, the numbers of the columns that stand there. The first of several lines
    is a name, which is as long as it is: only the others have to fit.
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
            # What is alone on its line is aligned with nothing.
            cells = (row[each].ljust(widths[each] if len(columns) > 1 else 0) for each in columns)
            lines.append(("   " if place else "") + "  ".join(cells).rstrip())
    return lines


def unwritable(paths: Iterable[Path]) -> Iterator[Problem]:
    """What keeps a command from writing its output, said before it begins: an hour's work is not lost to a typo."""
    for path in paths:
        if not path.parent.is_dir():
            yield Problem(
                f"cannot write {path}: there is no directory {path.parent}", "a directory that exists"
            )
        elif path.is_dir():
            yield Problem(f"cannot write {path}: it is a directory", "name a file in it")


def use_calibration(wanted: bool = True) -> None:
    """To be called before anything is predicted. A file that cannot be used is a warning, with what to do."""
    from shoal.facts.calibration import file

    folder = file.default_folder() if wanted else None
    for warning in file.use(folder):
        print(f"warning: {warning}", file=sys.stderr)


def measured_rates(cluster: Cluster) -> str | None:
    """One line for a person; None where nothing was measured."""
    from shoal.facts import calibration

    found = calibration.find(cluster)
    if found.measured is None and not found.links:
        return None
    return f"rates: {found.words}; --no-calibration ignores them"
