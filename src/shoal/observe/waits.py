"""Measure how long this process waits for its peers in the ``wait`` of collectives.

All of torch's Python functions for collectives wait through this one method, FSDP2's included. On gloo it returns when
the collective is complete. On a GPU it returns immediately, because the device waits instead of the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class Waits:
    """Total seconds over all threads."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


@contextmanager
def timed_waits(waits: Waits) -> Iterator[None]:
    """Add every wait for a collective to ``waits`` within this context, at under a microsecond per call."""
    # Read from the class dictionary: getattr returns a plain function, which could not be restored as a method.
    before = vars(dist.Work)["wait"]
    original = dist.Work.wait

    def wait(work: dist.Work, *arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(work, *arguments, **named)
        finally:
            waits.add(time.perf_counter() - started)

    work_class: Any = dist.Work
    work_class.wait = wait
    try:
        yield
    finally:
        work_class.wait = before
