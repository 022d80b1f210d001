"""A peer's journal: lets it begin a step when it is its turn, times the step, and records its loss."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

Given = TypeVar("Given")


class Journal:
    """One rank's end of the pipe to the benchmark. An order is a number of steps; an empty one ends the peer."""

    def __init__(self, pipe: Connection, device: torch.device) -> None:
        self._pipe = pipe
        self._clock = StepClock(device)
        self._losses: list[Tensor] = []
        self.read_losses: Callable[[], list[float]] = self._noted

    def note(self, loss: Tensor) -> None:
        """Record a step's mean loss. It is read after the turn, so recording does not synchronise."""
        self._losses.append(loss.detach())

    def paced(self, source: Iterator[Given]) -> Iterator[Given]:
        """The items of a loader, one per step, while it is this peer's turn.

        A step lasts from the request for its batch to the request for the next one: waiting for input, copying it and
        whatever a loop does after its update are included.
        """
        while steps := json.loads(self._pipe.recv_bytes()):
            self._clock.begin()
            for _ in range(steps):
                yield next(source)
                self._clock.mark()
            seconds = self._clock.end()
            report = {
                "step_s": seconds,
                "processor_s": self._clock.processor(),
                "losses": self.read_losses(),
                **self._clock.peaks(),
            }
            # Other peers may share the device: they can use what is not held between steps during their turns.
            torch.cuda.empty_cache()
            self._pipe.send_bytes(json.dumps(report).encode())

    def _noted(self) -> list[float]:
        return [float(loss) for loss in self._losses]


class StepClock:
    """Times steps without synchronising between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._marks: list[float] = []
        self._used: list[float] = []  # processor seconds of all of the process's threads
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        self._marks, self._used, self._events = [], [], []
        forget_peak_resident()
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self.mark()

    def mark(self) -> None:
        """On a GPU an event in the stream: when all work issued so far is done."""
        self._used.append(time.process_time())
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def end(self) -> list[float]:
        """Seconds of each step."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            return [first.elapsed_time(second) / 1e3 for first, second in pairwise(self._events)]
        return [second - first for first, second in pairwise(self._marks)]

    def processor(self) -> list[float]:
        """Processor seconds between the same marks. Unlike time, they hardly depend on what else the machine does."""
        return [second - first for first, second in pairwise(self._used)]

    def peaks(self) -> dict[str, int | None]:
        """Peak bytes of this turn. A CPU's allocator has no such count; the process's own includes libraries."""
        resident = peak_resident()
        if not self._on_gpu:
            return {"peak_allocated": None, "peak_reserved": None, "peak_resident": resident}
        return {
            "peak_resident": resident,
            "peak_allocated": torch.cuda.max_memory_allocated(self._device),
            "peak_reserved": torch.cuda.max_memory_reserved(self._device),
        }


def forget_peak_resident() -> None:
    """Reset the counter behind ``peak_resident``, if the system allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_resident() -> int | None:
    """The process's peak host memory in bytes; None if the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(found["VmHWM"].split()[0]) * 1024 if "VmHWM" in found else None
