"""Make untrusted text safe for a terminal: escape control characters and hidden text."""

from __future__ import annotations

import re

# Control codes but for the line break and the tab, both sets of them; and marks that turn the direction of writing.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """``text`` with every control code written out: ``\\x1b`` for the one that begins a terminal's commands."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
