"""Every command that a page shows: in blocks, and as code in a sentence or a table; and those of ``make demo``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What a reader types: after a prompt anything, and without one what begins with a program that pages speak of.
PROMPT = re.compile(r"^(?:node\d)?\$ ")
PROGRAMS = (
    "shoal", "make", "pip", "python", "torchrun", "srun", "mpirun", "all_reduce_perf", "tensorboard",
)  # fmt: skip
# In a block of a shell's words every line is a command.
SHELL = ("bash", "sh")
# What the last lines of a run say of a command stands behind it without a mark.
SAID = re.compile(r"  +[a-z(].*")
# What stands for a list of forms, or for words of the reader's own.
FORMS = re.compile(r"\[--|…")
INLINE = re.compile(r"`(shoal [a-z-][^`]*)`")


@dataclass(frozen=True, order=True)
class Shown:
    page: str
    place: int  # within the page
    words: tuple[str, ...]
    block: bool

    @property
    def line(self) -> str:
        return shlex.join(self.words)

    @property
    def shoal(self) -> tuple[str, ...] | None:
        """What follows the word shoal, behind any launcher; None: it is not a command of Shoal."""
        if self.words[0] in ("make", "pip", "python") or "shoal" not in self.words:
            return None
        return self.words[self.words.index("shoal") + 1 :]


def shown() -> Iterator[Shown]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        name = page.relative_to(ROOT).as_posix()
        blocks = [(place, line, True) for place, line in _in_blocks(text)]
        inline = [(place, line.replace("\\|", "|"), False) for place, line in _in_sentences(text)]
        for place, line, block in sorted(blocks + inline):
            if not FORMS.search(line):
                yield Shown(name, place, tuple(_words(line)), block)
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    for place, line in enumerate(recipe.splitlines()[1:]):
        yield Shown("Makefile", place, tuple(_words(line.strip().replace("$(BIN)/", ""))), True)


def _words(line: str) -> list[str]:
    words = shlex.split(SAID.sub("", line) if line.count("'") % 2 == 0 else line, comments=True)
    words[0] = words[0].removeprefix(".venv/bin/")
    return words


def blocks_of(text: str) -> Iterator[tuple[int, str, str]]:
    """Where it begins, its kind and its content; kinds may have words of their own, as ``timeline gpipe pp=3``."""
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines()):
        if not line.startswith("```"):
            lines.append(line)
        elif opened is None:
            opened, lines = (number + 1, line[3:].strip()), []
        else:
            yield (*opened, "\n".join(lines))
            opened = None
    assert opened is None, "a block is not closed"


def _in_blocks(text: str) -> Iterator[tuple[int, str]]:
    for first, kind, content in blocks_of(text):
        if kind not in ("", *SHELL):
            continue
        whole = ""
        for number, line in enumerate(content.splitlines()):
            whole += line.removesuffix("\\")
            if line.endswith("\\"):
                continue
            typed, whole = PROMPT.sub("", whole), ""
            program = typed.split(" ")[0].removeprefix(".venv/bin/")
            if typed != line or program in PROGRAMS or (kind in SHELL and program not in ("", "#")):
                yield first + number, typed


def _in_sentences(text: str) -> Iterator[tuple[int, str]]:
    inside = {
        first + number for first, _, content in blocks_of(text) for number in range(len(content.splitlines()))
    }
    for number, line in enumerate(text.splitlines()):
        if number not in inside:
            yield from ((number, found) for found in INLINE.findall(line))


def words_of(page: str, start: str) -> list[str]:
    """The words of the one command on a page that begins so, for the test that runs it."""
    (found,) = {one.words for one in shown() if one.page == page and one.line.startswith(start)}
    return [*found]


def put(words: list[str], **flags: object) -> list[str]:
    """With these values of these flags, whatever they had."""
    words = [*words]
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in words:
            words += [flag, ""]
        words[words.index(flag) + 1] = str(value)
    return words
