"""Bad input: all problems at once, each with its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

Found = TypeVar("Found")

# Limits on the length of one message and on their number: a file may have a million errors, a value a million letters.
LONGEST = 4000
MOST_PROBLEMS = 50


@dataclass(frozen=True)
class Problem:
    """One problem with the input, and its fix."""

    what: str
    fix: str = ""
    where: str | None = None  # FILE:LINE, --set KEY, a flag; or a config key, until its origin is known

    def shortened(self) -> Problem:
        where = self.where and shorten(self.where, LONGEST)
        return Problem(shorten(self.what, LONGEST), shorten(self.fix, LONGEST), where)

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}" if self.fix else self.what


class BadInput(Exception):
    """The command cannot be carried out as asked. The CLI prints it without a traceback and exits with 2."""

    def __init__(self, problems: Sequence[Problem] | Problem | str, fix: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem(problems, fix)
        told = (problems,) if isinstance(problems, Problem) else tuple(problems)
        if len(told) > MOST_PROBLEMS:
            told = (*told[:MOST_PROBLEMS], Problem(f"and {len(told) - MOST_PROBLEMS} more like these"))
        self.problems = tuple(one.shortened() for one in told)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[BadInput], tuple[tuple[Problem, ...]]]:
        """Pickle all problems with their fixes, for another process."""
        return BadInput, (self.problems,)


def seek(where: str, look: Callable[[], Found], problems: list[Problem]) -> Found | None:
    """The result of ``look``; on failure None, with the problem recorded under the key that requested it."""
    try:
        return look()
    except BadInput as error:
        begin = f"{where}: " if where else ""
        problems.extend(replace(problem, what=f"{begin}{problem.what}") for problem in error.problems)
        return None


def first_line(error: BaseException) -> str:
    """The first line of its message; its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, ignoring case; None if there is none, or several."""
    meant = _likely(word, known)
    return meant[0] if len(meant) == 1 else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean 'seed'?`` if one or two known words are close, otherwise the list of them."""
    known = list(known)
    meant = _likely(word, known)
    if 1 <= len(meant) <= 2:
        return f"did you mean {' or '.join(map(repr, meant))}?"
    return f"known: {', '.join(sorted(known))}"


def _likely(word: str, known: Iterable[str]) -> list[str]:
    """Known words within a typo of this one; otherwise those that begin with it.

    A different number is never a typo: llama3-7b is not llama3-70b, fp4 is not fp64. Nor are many typos in a short
    word.
    """
    word = word.lower()
    names = {name.lower(): name for name in known}
    if word in names:
        return [names[word]]
    limit = 1 if len(word) <= 5 else 2
    far = {
        name: _slips(word, name)
        for name in names
        if len(word) > 2 and _digits(name) == _digits(word) and abs(len(name) - len(word)) <= limit
    }
    near = [name for name, slips in far.items() if slips == min(far.values()) <= limit]
    begun = [name for name in names if len(word) > 2 and name.startswith(word)]
    return [names[name] for name in near or begun]


def _digits(word: str) -> list[str]:
    """Sorted digits, since bf61 is a typo for bf16."""
    return sorted(letter for letter in word if letter.isdigit())


def _slips(one: str, other: str) -> int:
    """Edit distance, counting swapped neighbours as one."""
    rows = [list(range(len(other) + 1))]
    for row, letter in enumerate(one, start=1):
        rows.append([row])
        for column, beside in enumerate(other, start=1):
            costs = [
                rows[row - 1][column] + 1,
                rows[row][column - 1] + 1,
                rows[row - 1][column - 1] + (letter != beside),
            ]
            if row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == beside:
                costs.append(rows[row - 2][column - 2] + 1)
            rows[row].append(min(costs))
    return rows[-1][-1]
