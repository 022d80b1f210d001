"""Stack dumps of a rank's threads, written on a signal without the GIL, and parsed."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import linecache
import os
import re
import signal
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.observe import waits as waited

DUMP_SIGNAL = signal.SIGUSR2

THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)

TORCH = str(Path(torch.__file__).parent)
# Code of libraries and the interpreter: the fix for a stall is seldom there.
FOREIGN = tuple({TORCH, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))})


# What a process's main thread does, by Linux's state letter.
DOING = {"R": "computing", "S": "sleeping", "D": "waiting for a disk or a device"}


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{shown(f'{self.file}:{self.line}')} in {self.function}"


@dataclass(frozen=True)
class Standing:
    """Where the main thread of a rank was found."""

    frames: tuple[Frame, ...] = ()  # innermost first
    stopped: bool = False  # by a signal, or a debugger
    locked: bool = False  # no Python thread runs: one of them holds the GIL
    state: str = ""  # one letter, as in Linux
    device: str = ""  # what its device has not finished

    @staticmethod
    def from_json(row: dict[str, Any]) -> Standing:
        """Restore one from ``asdict``, made on another machine."""
        return Standing(**{**row, "frames": tuple(Frame(**frame) for frame in row["frames"])})

    @property
    def frame(self) -> Frame | None:
        """The innermost frame outside libraries, which is where to look first."""
        own = [frame for frame in self.frames if not frame.file.startswith(FOREIGN)]
        return next(iter([*own, *self.frames]), None)

    @property
    def waits(self) -> bool:
        """Whether it is in a collective, or waits for one."""
        if not self.frames or self.stopped:
            return False
        inner = self.frames[0]
        in_torch = inner.file.startswith(str(Path(TORCH, "distributed")))
        return in_torch or ".wait(" in linecache.getline(inner.file, inner.line)

    def __str__(self) -> str:
        where = str(self.frame) if self.frame else "no Python code that could be seen"
        return f"{self._doing}at {where}{self.device and '; '}{self.device}"

    @property
    def _doing(self) -> str:
        if self.stopped:
            return "stopped by a signal or a debugger, "
        if self.waits:
            return ""
        held = "holding the Python lock, " if self.locked else ""
        return f"{held}{DOING[self.state]}, " if self.state in DOING else held


@contextmanager
def stacks_on_signal(path: Path) -> Iterator[None]:
    """Inside the context, ``DUMP_SIGNAL`` makes this process append the stacks of all threads to a file."""
    with path.open("w", encoding="utf-8") as file:
        faulthandler.register(DUMP_SIGNAL, file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(DUMP_SIGNAL)


def ask_for_stacks(process: int) -> None:
    """Ask a process to dump its stacks.

    The signal goes to its main thread: when a stopped process continues, any of its threads could handle the signal,
    and by then the main thread would be elsewhere.
    """
    to_thread = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)  # glibc from 2.30 on
    if to_thread is not None:
        to_thread(process, process, int(DUMP_SIGNAL))
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, DUMP_SIGNAL)


def main_thread(dump: str, identity: int) -> tuple[Frame, ...]:
    """The frames of the thread with that identity in a faulthandler dump; if none has it, of the last thread."""
    starts = [*THREAD.finditer(dump)]
    frames: tuple[Frame, ...] = ()
    # There may be none: a process that holds the GIL in C code, or has no disk space, writes nothing.
    for start, after in zip_longest(starts, starts[1:]):
        end = after.start() if after is not None else len(dump)
        found = FRAME.finditer(dump, start.end(), end)
        # Skip our own timers around waits, which say nothing about the place.
        frames = tuple(
            Frame(match[1], int(match[2]), match[3]) for match in found if match[1] != waited.__file__
        )
        if int(start[1], 16) == identity:
            break
    return frames


def shown(place: str) -> str:
    """``file:line`` as a user in this directory would write it."""
    for base in (Path.cwd(), Path(shoal.__file__).parent.parent):
        if place.startswith(f"{base}{os.sep}"):
            return place.removeprefix(f"{base}{os.sep}")
    return place
