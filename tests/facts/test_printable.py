"""Text of others on a terminal: nothing in it is a command."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.redact import printable


def test_commands_are_written_out() -> None:
    assert printable("a\x1b[2J\x9b1m\r\x07b") == r"a\x1b[2J\x9b1m\r\x07b"
    assert printable("left \u202e right \u2066") == r"left \u202e right \u2066"
    text = "línea\n\tdos — 雪 🐟 [bold]"
    assert printable(text) == text


@given(st.text())
def test_no_control_code_is_left(text: str) -> None:
    clean = printable(text)
    assert not [letter for letter in clean if unicodedata.category(letter) == "Cc" and letter not in "\n\t"]
    assert printable(clean) == clean
