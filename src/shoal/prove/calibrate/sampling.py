"""Samples: kernels timed in turns, again and again, as in a long run.

A device that has computed for a while runs slower than a fresh one: it is at its power limit. So nothing is timed by
itself. Every round starts all the samples, in another order, one behind the other without a gap, and what counts is
the median over rounds after a while. The load is then like a training step's: products, attention and what moves
bytes, mixed.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from shoal.comm.measure import wait

# A sample is repeated back to back until it takes about this long, so that starting a clock does not show.
LONG_ENOUGH = {"cuda": 1e-3, "cpu": 4e-3}
MOST_REPEATS = 40
# Kernels that can wait for the device before the host has to wait as well.
MOST_QUEUED = 800
# Rounds that are worth a median.
FEWEST_ROUNDS = 3
# How far ahead of the device the host stays while it starts a sample, beyond what starting it takes.
AHEAD = 0.5e-3


class TimedWork:
    """Work that is started again and again. ``key`` is whose it is; ``make`` makes ready what it computes with."""

    def __init__(self, key: tuple[object, ...], make: Callable[[], Callable[[], object]]) -> None:
        self.key, self.make = key, make
        self.repeats = 1
        self.starting = 0.0  # seconds that the host takes to start all repeats
        self.seen: list[float] = []
        self.run: Callable[[], object] = _nothing

    @property
    def seconds(self) -> float:
        """Of one repeat."""
        return statistics.median(self.seen)

    def __str__(self) -> str:
        return " ".join(map(str, self.key))


def _nothing() -> None:
    """What a sample runs that was not made ready."""


@dataclass
class Filler:
    """Work that keeps a device busy while the host prepares what follows."""

    run: Callable[[], object]
    product: bool
    seconds: float = 0.0
    count: int = 0


class Rounds:
    """Times samples on one device."""

    def __init__(self, device: torch.device, samples: Iterable[TimedWork], fillers: Sequence[Filler]) -> None:
        """``fillers``: a large product first, then what only moves bytes; they take turns."""
        self.device, self.samples = device, list(samples)
        self.fillers = list(fillers)
        self.failed: list[str] = []
        self.order = random.Random(0)
        self._turn = 0

    def run(self, warm_up: float, seconds: float) -> list[TimedWork]:
        """First all samples once, to load their kernels; then rounds, of which those of the warm-up do not count.

        Returns the samples that worked; the others are in ``failed``.
        """
        self._prepare()
        if not self.samples:
            return []
        start = time.perf_counter()
        warm = False
        while True:
            spent = time.perf_counter() - start
            if not warm and spent >= warm_up:
                warm = True
                for sample in self.samples:
                    sample.seen.clear()
                for filler in self.fillers:
                    filler.count = 0
            rounds = len(self.samples[0].seen) if warm else 0
            if rounds >= FEWEST_ROUNDS and spent >= warm_up + seconds:
                return self.samples
            self.order.shuffle(self.samples)
            self._cuda_round() if self.device.type == "cuda" else self._cpu_round()

    def busy(self, computes: Callable[[TimedWork], bool]) -> float:
        """Of the time that rounds took, the share of large products and of samples that compute."""
        spent = {True: 1e-9, False: 0.0}
        for sample in self.samples:
            spent[computes(sample)] += sum(sample.seen) * sample.repeats
        for filler in self.fillers:
            spent[filler.product] += filler.count * filler.seconds
        return spent[True] / (spent[True] + spent[False])

    def alone(self, seconds: float) -> float:
        """Seconds of the large product where nothing else runs, after half of the time given."""
        large = self.fillers[0]
        for _ in range(2):
            start, count = time.perf_counter(), 0
            while (spent := time.perf_counter() - start) < seconds / 2 or not count:
                for _ in range(max(1, min(MOST_QUEUED, round(0.05 / max(large.seconds, 1e-6))))):
                    large.run()
                    count += 1
                wait(self.device)
        return spent / count

    def load(self, seconds: float) -> None:
        """Give an accelerator so much to do, without waiting for it."""
        if self.device.type == "cuda":
            large = self.fillers[0]
            for _ in range(min(MOST_QUEUED, round(seconds / max(large.seconds, 1e-6)))):
                large.run()

    def _prepare(self) -> None:
        """What does not run here, for want of memory or of a kernel, is left out and said."""
        for filler in self.fillers:
            filler.run()
            filler.seconds = min(self._once(filler.run)[0] for _ in range(3))
        ready = []
        for sample in self.samples:
            try:
                sample.run = sample.make()
                sample.run()  # kernels are loaded and chosen when they are first started
                taken, _ = self._once(sample.run)
                enough = LONG_ENOUGH[self.device.type]
                sample.repeats = max(1, min(MOST_REPEATS, round(enough / max(taken, 1e-6))))
                _, starting = self._once(sample.run)
                sample.starting = starting * sample.repeats
            except Exception as error:  # no memory, no kernel, whatever: the other samples are worth it
                sample.run = _nothing
                self.failed.append(f"{sample}: {(str(error).splitlines() or [repr(error)])[0][:200]}")
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            else:
                ready.append(sample)
        self.samples = ready

    def _once(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds until it is done, and until it is started."""
        wait(self.device)
        start = time.perf_counter()
        run()
        started = time.perf_counter()
        wait(self.device)
        return time.perf_counter() - start, started - start

    def _cpu_round(self) -> None:
        for sample in self.samples:
            start = time.perf_counter()
            for _ in range(sample.repeats):
                sample.run()
            sample.seen.append((time.perf_counter() - start) / sample.repeats)

    def _cuda_round(self) -> None:
        """The device always has something to do when the host starts a sample, so no gap is timed."""
        clocks = []
        busy_until = time.perf_counter()
        for sample in self.samples:
            while busy_until - time.perf_counter() < 1.5 * sample.starting + AHEAD:
                filler = self.fillers[self._turn % len(self.fillers)]
                self._turn += 1
                # As much time for products as for the rest, whichever takes longer at once.
                for _ in range(max(1, round(self.fillers[0].seconds / max(filler.seconds, 1e-6)))):
                    filler.run()
                    filler.count += 1
                    busy_until = max(busy_until, time.perf_counter()) + filler.seconds
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(sample.repeats):
                sample.run()
            end.record()
            clocks.append((sample, start, end))
            expected = sample.seen[-1] * sample.repeats if sample.seen else 0.0
            busy_until = max(busy_until, time.perf_counter()) + expected
        wait(self.device)
        for sample, start, end in clocks:
            sample.seen.append(start.elapsed_time(end) / 1e3 / sample.repeats)


class Pool:
    """Random numbers to compute with: zeros would take less power, and so less time, than what is trained on.

    Every operand is a view of one buffer, so that a hundred shapes fit side by side.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, elements: int) -> None:
        self.device, self.dtype = device, dtype
        self.buffer = torch.randn(elements, device=device, dtype=torch.float32).mul_(0.5).to(dtype)
        self._next = 0

    def take(self, *size: int) -> torch.Tensor:
        """A tensor of that size, to be read and not written; several may overlap."""
        count = math.prod(size)
        if self._next + count > self.buffer.numel():
            self._next = 0
        found = self.buffer[self._next : self._next + count].view(size)
        # The next one starts on a boundary that kernels like.
        self._next += -(-count // 1024) * 1024
        return found
