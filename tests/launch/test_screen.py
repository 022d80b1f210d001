"""What reaches a terminal: text as text, and of commands only those that rich makes itself."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.facts.redact import Redactor
from shoal.launch.redacted import RedactedStream, redacted_output
from shoal.launch.screen import Console

EVIL = "\x1b[2J\x1b]0;title\x07\x9b1A\rhidden"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def shown() -> Iterator[Terminal]:
    """A terminal in place of standard output, as commands print to it."""
    screen = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.setattr(sys, "stdout", screen)
        with redacted_output():
            yield screen


def harmless(written: str) -> bool:
    return not re.search(r"\x1b\[2J|\x1b\]|\x07|\x9b|\rhidden", written)


def test_what_is_printed() -> None:
    with shown() as terminal:
        print(EVIL, "é\tand\nmore")
        sys.stdout.writelines([EVIL, EVIL])
    assert harmless(terminal.getvalue()) and "é\tand\nmore" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()


def test_lines_of_a_log_begin_with_the_time() -> None:
    log = io.StringIO()
    stream = RedactedStream(log, Redactor(), stamped=True)
    for text in ("one ", "line", "\n", "two\nthree\n", "", "\n", "four"):
        stream.write(text)
    lines = log.getvalue().split("\n")
    stamps, texts = zip(*(line.split(" ", 1) for line in lines), strict=True)
    assert texts == ("one line", "two", "three", "", "four")
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", stamp) for stamp in stamps)


def test_what_a_console_shows() -> None:
    with shown() as terminal:
        console = Console(highlight=False, soft_wrap=True)
        table = Table(title=EVIL)
        table.add_column(EVIL)
        table.add_row(EVIL)
        console.print(EVIL, markup=False)
        console.print(table)
        console.print(f"[red]{EVIL}[/red]")
    assert harmless(terminal.getvalue())
    assert "\x1b[31m" in terminal.getvalue(), "rich's own colours pass"


def test_what_a_live_line_shows() -> None:
    with shown() as terminal:
        console = Console(highlight=False, soft_wrap=True)
        with Live(console=console, auto_refresh=False, transient=True) as live:
            live.update(Text(EVIL), refresh=True)
            console.print(EVIL, markup=False)
            print(EVIL)
            live.update(Text("second"), refresh=True)
    written = terminal.getvalue()
    assert harmless(written)
    assert "\x1b[2K" in written and r"\x1b[2K" not in written, "the line is replaced, as rich does it"


def test_secrets_are_still_taken_out() -> None:
    with shown() as terminal:
        token = "hf_" + "a1B2" * 8
        Console(highlight=False, soft_wrap=True).print(token, markup=False)
        print(token)
    assert token not in terminal.getvalue() and terminal.getvalue().count("[redacted]") == 2
