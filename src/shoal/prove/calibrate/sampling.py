"""Samples: kernels timed in turns, again and again, as in a long run.

A device under load is slower than an idle one, because it reaches its power limit. So nothing is timed in isolation.
Every round runs all samples in a new order, back to back without gaps; the result is the median over rounds after a
warm-up. The load is then like a training step's: a mix of matmuls, attention and memory-bound work.
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

# A sample is repeated back to back until it takes about this long, so that the cost of timing is negligible.
LONG_ENOUGH = {"cuda": 1e-3, "cpu": 4e-3}
MOST_REPEATS = 40
# Kernels that can be queued on the device before the host blocks.
MOST_QUEUED = 800
# The fewest rounds for a median.
FEWEST_ROUNDS = 3
# How far the host stays ahead of the device while launching a sample, beyond the launch time itself.
AHEAD = 0.5e-3


class TimedWork:
    """Work that is launched repeatedly. ``key`` identifies it; ``make`` prepares its operands."""

    def __init__(self, key: tuple[object, ...], make: Callable[[], Callable[[], object]]) -> None:
        self.key, self.make = key, make
        self.repeats = 1
        self.starting = 0.0  # seconds that the host takes to launch all repeats
        self.seen: list[float] = []
        self.run: Callable[[], object] = _nothing

    @property
    def seconds(self) -> float:
        """Seconds per repeat."""
        return statistics.median(self.seen)

    def __str__(self) -> str:
        return " ".join(map(str, self.key))


def _nothing() -> None:
    """Placeholder for a sample that is not prepared."""


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
        """``fillers``: a large matmul first, then memory-bound work; they alternate."""
        self.device, self.samples = device, list(samples)
        self.fillers = list(fillers)
        self.failed: list[str] = []
        self.order = random.Random(0)
        self._turn = 0

    def run(self, warm_up: float, seconds: float) -> list[TimedWork]:
        """Run all samples once to load their kernels, then rounds; those of the warm-up do not count.

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
        """The fraction of the rounds' time spent in large matmuls and compute-bound samples."""
        spent = {True: 1e-9, False: 0.0}
        for sample in self.samples:
            spent[computes(sample)] += sum(sample.seen) * sample.repeats
        for filler in self.fillers:
            spent[filler.product] += filler.count * filler.seconds
        return spent[True] / (spent[True] + spent[False])

    def alone(self, seconds: float) -> float:
        """Seconds of the large matmul alone, measured in the second half of the given time."""
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
        """Give an accelerator this much work, without waiting for it."""
        if self.device.type == "cuda":
            large = self.fillers[0]
            for _ in range(min(MOST_QUEUED, round(seconds / max(large.seconds, 1e-6)))):
                large.run()

    def _prepare(self) -> None:
        """Prepare samples; those that do not run here, for lack of memory or of a kernel, are reported and left out."""
        for filler in self.fillers:
            filler.run()
            filler.seconds = min(self._once(filler.run)[0] for _ in range(3))
        ready = []
        for sample in self.samples:
            try:
                sample.run = sample.make()
                sample.run()  # kernels are loaded and chosen at their first launch
                taken, _ = self._once(sample.run)
                enough = LONG_ENOUGH[self.device.type]
                sample.repeats = max(1, min(MOST_REPEATS, round(enough / max(taken, 1e-6))))
                _, starting = self._once(sample.run)
                sample.starting = starting * sample.repeats
            except Exception as error:  # no memory or no kernel: the other samples are still useful
                sample.run = _nothing
                self.failed.append(f"{sample}: {(str(error).splitlines() or [repr(error)])[0][:200]}")
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            else:
                ready.append(sample)
        self.samples = ready

    def _once(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds until it is done, and until it is launched."""
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
        """The device is always busy when the host launches a sample, so no gap is timed."""
        clocks = []
        busy_until = time.perf_counter()
        for sample in self.samples:
            while busy_until - time.perf_counter() < 1.5 * sample.starting + AHEAD:
                filler = self.fillers[self._turn % len(self.fillers)]
                self._turn += 1
                # Spend equal time on matmuls and on the rest.
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
    """Random operands: zeros would draw less power, and so take less time, than real training data.

    Every operand is a view of one buffer, so that a hundred shapes fit side by side.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, elements: int) -> None:
        self.device, self.dtype = device, dtype
        self.buffer = torch.randn(elements, device=device, dtype=torch.float32).mul_(0.5).to(dtype)
        self._next = 0

    def take(self, *size: int) -> torch.Tensor:
        """A read-only tensor of that size; several may overlap."""
        count = math.prod(size)
        if self._next + count > self.buffer.numel():
            self._next = 0
        found = self.buffer[self._next : self._next + count].view(size)
        # The next one starts at an aligned boundary.
        self._next += -(-count // 1024) * 1024
        return found
