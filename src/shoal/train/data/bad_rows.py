"""Bad rows: counted, kept for inspection, and refused when there are too many."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.facts.problem import BadInput
from shoal.train.data.conversations import ANSWERS, CHOICES, NO_ANSWER
from shoal.train.data.encode import Encoded, EncodeTask
from shoal.train.data.row_format import EMPTY
from shoal.train.data.sources import SourceFile

A_FEW = 10  # tolerated if any are, but at most half: a torn last line is no reason to stop
NAMED = 3


@dataclass(frozen=True)
class BadRows:
    """Rows that are not valid documents, with the number of all rows."""

    rows: int
    reasons: dict[str, int]
    first: tuple[str, ...]  # a few of them, in readable form

    @property
    def bad(self) -> int:
        return sum(self.reasons.values())


def count_bad_rows(tasks: Iterable[EncodeTask], results: Iterable[Encoded]) -> BadRows:
    tasks, results = list(tasks), list(results)
    reasons: Counter[str] = Counter()
    for result in results:
        reasons.update(result.reasons)
    first = tuple(describe(row) for row, _ in zip(located(tasks, results), range(NAMED), strict=False))
    return BadRows(sum(result.rows for result in results), dict(sorted(reasons.items())), first)


def located(tasks: Iterable[EncodeTask], results: Iterable[Encoded]) -> Iterator[dict[str, Any]]:
    """Every bad row with its file and line number there: a worker knows only the line numbers in its own piece."""
    current: SourceFile | None = None
    before = 0  # lines of the current file in earlier pieces
    for task, result in zip(tasks, results, strict=True):
        places: list[tuple[str, int]] = []
        for piece, lines in zip(task.pieces, result.lines, strict=True):
            if piece.file != current:
                current, before = piece.file, 0
            places.append((piece.file.name, before))
            before += lines
        if not result.reasons:
            continue
        with task.file("bad").open(encoding="utf-8") as handle:
            for text in handle:
                row = json.loads(text)
                name, offset = places[row["piece"]]
                yield {
                    "file": name,
                    "line": offset + row["line"],
                    "reason": row["reason"],
                    "start": row["start"],
                }


def read_bad_rows(manifest: dict[str, Any], quarantine: Path) -> BadRows:
    """The bad rows of a previously prepared dataset."""
    with quarantine.open(encoding="utf-8") as handle:
        first = tuple(describe(json.loads(text)) for text, _ in zip(handle, range(NAMED), strict=False))
    return BadRows(manifest["rows"], manifest["bad_rows"], first)


def describe(row: dict[str, Any]) -> str:
    return f"{row['file']}:{row['line']}: {row['reason']}"


def refuse_too_many(found: BadRows, fraction: float, source: str) -> None:
    """Raise BadInput if more than ``fraction`` of all rows (and more than a few) are bad, or all are."""
    allowed = tolerated(found.rows, fraction)
    if found.bad <= allowed and found.bad < found.rows:
        return
    if set(found.reasons) <= {EMPTY} and found.bad == found.rows:
        raise BadInput(
            f"data.source {source!r} is empty: there is no text in it", "name files that hold text"
        )
    reasons = ", ".join(f"{reason}: {count}" for reason, count in found.reasons.items()) or "there are none"
    shown = "".join(f"\n    {text}" for text in found.first)
    raise BadInput(
        f"{found.bad} of the {found.rows} rows of {source!r} are bad, at most {allowed} may be; "
        f"{reasons}{shown}",
        f"{_remedy(found)}, or raise data.max_bad_rows",
    )


def tolerated(rows: int, fraction: float) -> int:
    """How many of ``rows`` may be left out."""
    return max(min(A_FEW, rows // 2), int(fraction * rows)) if fraction else 0


def _remedy(found: BadRows) -> str:
    """A missing field may have another name; a conversation may lack an answer."""
    if found.reasons.keys() == {NO_ANSWER}:
        return f"give each row an answer, in a conversation a message of the role {ANSWERS!r}"
    if any(name in reason for reason in found.reasons for name in CHOICES):
        return "give each row a prompt and two answers that differ, 'chosen' and 'rejected'"
    return "correct the rows, name the text's field in data.field"
