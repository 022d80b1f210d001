"""Handle signals for the duration of a block."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

# Signals that mean: finish the step, commit, end.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

Handler = Callable[[int, FrameType | None], None]


# Stop signals that this command answered with KeyboardInterrupt, which a library being imported may have caught.
interrupts: list[int] = []


def interrupt(number: int, frame: FrameType | None) -> None:
    """Treat all stop signals alike, SIGINT too, which a shell's background jobs ignore by default."""
    interrupts.append(number)
    raise KeyboardInterrupt


@contextlib.contextmanager
def stoppable(handler: Handler, signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Send these signals to ``handler`` within the block; restores the previous handlers afterwards.

    Raises again an earlier interrupt that a library caught, so that the user's stop request is not lost.
    """
    if interrupts:
        raise KeyboardInterrupt
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
