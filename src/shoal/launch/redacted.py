"""Redact secrets from this process's output as it is written, and from other processes' log files afterwards.

A rank's output goes straight to its log, with nothing in between that could lose a crash's last words. So Python's own
streams redact each text as it is written, and other output (C++ code, a subprocess) is redacted in the file by the
launcher: at the end of each attempt and, in case the launcher itself was killed, when the next one begins.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from shoal.facts.redact import Redactor, printable

# Bytes of a log to read at once, up to the end of a line.
BLOCK = 1 << 22


class RedactedStream:
    """A text stream that redacts what is written; everything else is delegated to the underlying stream.

    Control codes are escaped, so that no text can command a terminal. Rich's codes pass: text that goes through a
    ``screen.Console`` was cleaned there.
    """

    def __init__(
        self, stream: TextIO, redactor: Redactor, codes: bool = False, stamped: bool = False
    ) -> None:
        """``stamped``: start each line with the time."""
        self._stream, self._redactor, self._codes = stream, redactor, codes
        self._stamped, self._begins = stamped, True
        if not codes:
            # The stream that rich writes to in place of this one.
            self.rich_proxied_file = RedactedStream(stream, redactor, codes=True)

    def write(self, text: str) -> int:
        clean = self._redactor.text(text)
        shown = clean if self._codes else printable(clean)
        self._stream.write(self._with_time(shown) if self._stamped and shown else shown)
        return len(text)

    def stamp(self, on: bool) -> None:
        self._stamped, self._begins = on, True

    def _with_time(self, text: str) -> str:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ ", time.gmtime())
        first, self._begins = now if self._begins else "", text.endswith("\n")
        return first + re.sub(r"\n(?!\Z)", "\n" + now, text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """Inside the context, secrets in printed text are redacted."""
    before = sys.stdout, sys.stderr
    redact_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def redact_output(stamped: bool = False) -> None:
    """From now on redact printed text: values of secret environment variables as of now, and anything that looks like a
    secret.

    ``stamped``: lines begin with the time.
    """
    redactor = Redactor()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, RedactedStream):
            setattr(sys, name, RedactedStream(stream, redactor, stamped=stamped))
        elif isinstance(stream, RedactedStream):
            stream.stamp(stamped)


class LogRedactor:
    """Redacts logs that are no longer written to. Remembers its position, so that a long log is read once."""

    def __init__(self) -> None:
        self._redactor = Redactor()
        self._done: dict[Path, int] = {}

    def redact(self, logs: Path, some: Iterable[Path] | None = None) -> None:
        """Redact all files in this directory, or some. One that cannot be read or written must not end a run."""
        with contextlib.suppress(OSError):
            for log in sorted(logs.iterdir()) if some is None else some:
                with contextlib.suppress(OSError):
                    self._done[log] = self._redact_file(log, self._done.get(log, 0))

    def _redact_file(self, log: Path, start: int) -> int:
        """Redact in place, because a process that outlived its rank may still append. Returns the position reached."""
        with log.open("r+b") as file:
            file.seek(start)
            # From the first change on, everything after it moves.
            moved: list[bytes] = []
            first = start
            while block := file.read(BLOCK) + file.readline():
                clean = self._clean(block)
                if moved or clean != block:
                    moved.append(clean)
                else:
                    first = file.tell()
            if moved:
                file.seek(first)
                file.writelines(moved)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def _clean(self, block: bytes) -> bytes:
        return self._redactor.text(block.decode("utf-8", "surrogateescape")).encode(
            "utf-8", "surrogateescape"
        )
