"""Parse the command line that starts training: launcher, number of ranks, program, options."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal.plan.importers.reading import Unknown
from shoal.plan.importers.shell_file import ShellScript

_PER_NODE = ("nproc-per-node", "num-gpus", "gpus-per-node", "ntasks-per-node")
_NODES = ("nnodes", "num-nodes", "nodes")
_NUMBER = re.compile(r"-\.?[0-9]")


@dataclass(frozen=True)
class LaunchLine:
    launcher: str  # torchrun, accelerate, deepspeed, …; empty if the file holds only options
    before: dict[str, Any]  # the launcher's own options, with dashes
    options: dict[str, Any]  # the program's options, as written
    twice: tuple[str, ...]  # options given twice with different values; the last one applies
    ranks: int | None  # if the line says it


def launch_lines(script: ShellScript) -> list[LaunchLine]:
    """Every command that starts a Python program with options; for a file with only options, those."""
    found = []
    for words in script.commands:
        place = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
        if place is None and "-m" in words[:-1]:
            # python -m torchtitan.train; after a launcher's own -m comes a program.
            place = words.index("-m") + 1
        if place is not None and any(word.startswith("--") for word in words):
            found.append(_line(words[:place], words[place + 1 :], script.batch))
    if not found:
        loose = [word for words in script.commands if words[0].startswith("--") for word in words]
        if loose:
            found.append(_line([], loose, script.batch))
    return found


def _line(before: list[str], after: list[str], batch: dict[str, str]) -> LaunchLine:
    launcher = next((word.rpartition("/")[2] for word in before if not word.startswith("-")), "")
    theirs, _ = options_of(before)
    dashed = {name.replace("_", "-"): value for name, value in theirs.items()}
    options, twice = options_of(after)
    return LaunchLine(launcher, dashed, options, twice, _ranks(before, dashed, batch))


def options_of(words: Iterable[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``{"num-layers": "32", "bf16": True, …}``, and the options given two values."""
    found: dict[str, Any] = {}
    twice: list[str] = []
    name = ""
    values: list[str] = []

    def close() -> None:
        if not name:
            return
        value = True if not values else values[0] if len(values) == 1 else list(values)
        if name in found and found[name] != value:
            twice.append(name)
        found[name] = value

    for word in words:
        if word.startswith("--") and len(word) > 2:
            close()
            name, equals, first = word[2:].partition("=")
            values = [Unknown(first) if isinstance(word, Unknown) else first] if equals else []
        elif word.startswith("-") and not _NUMBER.match(word):
            close()
            name, values = "", []
        elif not (isinstance(word, Unknown) and values):  # a variable after a value holds further options
            values.append(word)
    close()
    return found, tuple(twice)


def _ranks(words: list[str], options: dict[str, Any], batch: dict[str, str]) -> int | None:
    """The number of ranks passed to torchrun, deepspeed, mpirun or Slurm."""
    if "num-processes" in options:
        return _count(options["num-processes"])
    for flag in ("-np", "-n"):
        if flag in words[:-1] and words[0].rpartition("/")[2] in ("mpirun", "mpiexec", "srun"):
            return _count(words[words.index(flag) + 1])
    asked = {**batch, **options}
    each = next((count for name in _PER_NODE if (count := _count(asked.get(name)))), None)
    nodes = next((count for name in _NODES if (count := _count(asked.get(name)))), None)
    if each is None:
        return None
    said = [name for name in _NODES if name in asked]
    return None if said and nodes is None else each * (nodes or 1)


def _count(value: object) -> int | None:
    text = str(value)
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0 else None
