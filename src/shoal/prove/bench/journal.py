"""A peer's journal: lets it begin a step when its turn has come, times the step, keeps its loss."""

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
    """One rank's end of the pipe to the benchmark. An order is a number of steps; none ends the peer."""

    def __init__(self, pipe: Connection, device: torch.device) -> None:
        self._pipe = pipe
        self._clock = StepClock(device)
        self._losses: list[Tensor] = []
        self.read_losses: Callable[[], list[float]] = self._noted

    def note(self, loss: Tensor) -> None:
        """A step's mean loss. It is read after the turn: who notes it does not wait for the device."""
        self._losses.append(loss.detach())

    def paced(self, source: Iterator[Given]) -> Iterator[Given]:
        """The items of a loader, one a step, while it is this peer's turn.

        A step lasts from the moment its batch is asked for to the moment the next one is: waiting for input, copying
        it and whatever a loop does after its update are part of it.
        """
        while steps := json.loads(self._pipe.recv_bytes()):
            self._clock.begin()
            for _ in range(steps):
                yield next(source)
                self._clock.mark()
            seconds = self._clock.end()
            report = {"step_s": seconds, "losses": self.read_losses(), **self._clock.peaks()}
            # Others may share the device: what is not held between steps is theirs for the time of their turns.
            torch.cuda.empty_cache()
            self._pipe.send_bytes(json.dumps(report).encode())

    def _noted(self) -> list[float]:
        return [float(loss) for loss in self._losses]


class StepClock:
    """Times steps without making the host wait for the device between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        self._marks, self._events = [], []
        forget_peak_resident()
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self.mark()

    def mark(self) -> None:
        """On a GPU an event in the stream: the moment when all work so far is done, whenever it was issued."""
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

    def peaks(self) -> dict[str, int | None]:
        """Bytes of this turn. A CPU's allocator keeps no such count; a process's own has its libraries in it."""
        resident = peak_resident()
        if not self._on_gpu:
            return {"peak_allocated": None, "peak_reserved": None, "peak_resident": resident}
        return {
            "peak_resident": resident,
            "peak_allocated": torch.cuda.max_memory_allocated(self._device),
            "peak_reserved": torch.cuda.max_memory_reserved(self._device),
        }


def forget_peak_resident() -> None:
    """From now on ``peak_resident`` counts anew, where the system lets a process say so."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_resident() -> int | None:
    """The most bytes of the host's memory that this process has had; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(found["VmHWM"].split()[0]) * 1024 if "VmHWM" in found else None
