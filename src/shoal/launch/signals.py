"""Handle signals for the duration of a block."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

# Signals that mean: finish the step, commit, end.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

Handler = Callable[[int, FrameType | None], None]


# Stop signals that this command has answered with KeyboardInterrupt. A library that is being imported may catch that.
interrupts: list[int] = []


def interrupt(number: int, frame: FrameType | None) -> None:
    """All stop signals alike, SIGINT too: a shell's background job would find it ignored."""
    interrupts.append(number)
    raise KeyboardInterrupt


@contextlib.contextmanager
def stoppable(handler: Handler, signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Send these signals to ``handler`` within the body; afterwards they do what they did before.

    An earlier interrupt that a library caught, and with it the user's wish to stop, is raised again.
    """
    if interrupts:
        raise KeyboardInterrupt
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
