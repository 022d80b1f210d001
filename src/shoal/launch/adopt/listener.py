"""A thread of an adopted rank that listens while it trains: for stop signals, and for the end of its round."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from shoal.launch.adopt.rank_rendezvous import BEAT_SECONDS, RankRendezvous
from shoal.launch.rendezvous import STOP
from shoal.launch.report import FAILED
from shoal.launch.signals import STOP_SIGNALS, stoppable
from shoal.train.loop import Training

# How long a rank that was asked to stop before it has begun waits for the others, so that all do the same.
START_SECONDS = 5.0


class Listener:
    """A thread with its own connection, because the main thread may block in a collective."""

    def __init__(self, call: RankRendezvous, told: Callable[[str], None], leave: Callable[[], None]) -> None:
        """``told``: print a line for the user. ``leave``: end this process, which has not begun to train."""
        self.call, self.told, self._leave = call, told, leave
        self._begun = False
        self.asked = 0.0  # when a signal first asked to stop
        self._store = call.again()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._over = False
        self._beat = 0
        self._thread = threading.Thread(target=self._run, name="shoal-listener", daemon=True)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        # The system's own handler writes to the pipe, even while Python's cannot run.
        before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        try:
            with stoppable(self._on_signal, STOP_SIGNALS):
                self._thread.start()
                yield
        finally:
            signal.set_wakeup_fd(before)
            self._over = True
            with contextlib.suppress(OSError):
                os.write(self._writing, b"\0")
            self._thread.join(BEAT_SECONDS)

    # The training's observer interface.

    def enter(self, phase: str, step: int) -> None:
        """Also recorded by the flight recorder, for others."""

    def meet(self, training: Training) -> None:
        self._begun = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal requests a stop; a later Ctrl-C forces it. Schedulers repeat their signals without
        meaning more.
        """
        if self.asked and number == signal.SIGINT and time.monotonic() - self.asked > 1.0:
            os._exit(FAILED)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone; collectives will report what that means
            while not self._over:
                self._say_and_hear()
                if self.asked and not self._begun and time.monotonic() - self.asked > START_SECONDS:
                    self._leave()
                if select.select([self._reading], [], [], BEAT_SECONDS)[0]:
                    self._hear_signals(os.read(self._reading, 4096))

    def _say_and_hear(self) -> None:
        self._beat += 1
        self._store.set(f"beat-{self.call.told.rank}", str(self._beat))
        if int(self._store.read("called") or 0) > self.call.number:
            self.told(f"rank {self.call.told.rank}: the others have been started again; this process ends")
            os._exit(FAILED)

    def _hear_signals(self, numbers: bytes) -> None:
        if not {*numbers} & {int(number) for number in STOP_SIGNALS}:
            return
        if not self.asked:
            self.asked = time.monotonic()
            self.call.of_round(self._store).set(STOP, "1")
            if self.call.told.local_rank == 0:
                self.told("stopping after this step")
