"""Bad input, as the user meets it: everything that is wrong, at once, each with its fix."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Found = TypeVar("Found")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what we were given, and what would put it right."""

    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}" if self.fix else self.what


class BadInput(Exception):
    """The command cannot be carried out as asked. The CLI prints it without a traceback and exits with 2."""

    def __init__(self, problems: Sequence[Problem] | Problem | str, fix: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem(problems, fix)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def seek(where: str, look: Callable[[], Found], problems: list[Problem]) -> Found | None:
    """What ``look`` finds; else None, and why, under the key that asked for it."""
    try:
        return look()
    except BadInput as error:
        begin = f"{where}: " if where else ""
        problems.extend(Problem(f"{begin}{problem.what}", problem.fix) for problem in error.problems)
        return None


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, upper and lower case aside; None where none is close."""
    by_lower_case = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.6)
    return by_lower_case[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean 'seed'?`` where one of the known words is close, else the list of them."""
    known = list(known)
    meant = closest(word, known)
    return f"did you mean {meant!r}?" if meant else f"known: {', '.join(sorted(known))}"
