"""Which line of Shoal's own code is executing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

# The installed package, not any directory of that name: a checkout may contain all of torch.
HOME = f"{Path(__file__).parents[1]}/"
WATCHING = ("observe/", "prove/")


def line_of_ours() -> str:
    """The innermost line of training code, as file:number; empty if there is none. Observing code does not count."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(HOME) and not name.startswith(WATCHING, len(HOME)):
            return f"{name.removeprefix(HOME)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
