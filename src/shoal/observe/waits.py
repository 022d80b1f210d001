"""How long this process has waited for its peers in the ``wait`` of collectives.

All of torch's Python functions for collectives wait by that one method, FSDP2's included. On gloo it returns when the
collective is over. On a GPU it returns at once, for there the device waits and not the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class Waits:
    """Seconds, added up over all threads."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


@contextmanager
def timed_waits(waits: Waits) -> Iterator[None]:
    """Inside, every wait for a collective is added to ``waits``: less than a microsecond a call."""
    # As the class holds it: what getattr gives has forgotten that it is a method, and could not be put back.
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
