"""Send an adopted rank's output to its log, except for the lines meant for the user."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.facts.redact import Redactor, redact
from shoal.launch.redacted import RedactedStream, redact_output
from shoal.launch.screen import Console
from shoal.launch.worker import print_to

# Where torchrun looks for a rank's error message.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class Output:
    """The original standard output (a terminal, or what the launcher put in its place), kept beside the log."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._kept = [os.dup(number) for number in (1, 2)]
        file = os.fdopen(os.dup(self._kept[1]), "w", errors="backslashreplace", buffering=1)
        self.console = Console(file=RedactedStream(file, Redactor()), highlight=False, soft_wrap=True)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def to(self, log: Path) -> Iterator[None]:
        """Inside the context, what this process prints goes to a log."""
        print_to(log)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            for number, kept in zip((1, 2), self._kept, strict=True):
                os.dup2(kept, number)
            redact_output()

    def say(self, text: str) -> None:
        self.console.print(redact(text), markup=False)


def tell_torchrun(message: str) -> None:
    """Write the error where torchrun's summary finds it, so that it shows more than an exit code."""
    if path := os.environ.get(ERROR_FILE):
        told = {"message": redact(message), "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": told}), encoding="utf-8")
