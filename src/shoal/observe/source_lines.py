"""Which line of Shoal's own code is executing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

# Of the package, and not of a directory that happens to have its name: a checkout may, with all of torch inside.
HOME = f"{Path(__file__).parents[1]}/"
WATCHING = ("observe/", "prove/")


def line_of_ours() -> str:
    """The innermost one that trains, as file:number; empty where there is none. What only watches does not count."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(HOME) and not name.startswith(WATCHING, len(HOME)):
            return f"{name.removeprefix(HOME)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
