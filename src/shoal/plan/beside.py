"""Work in a process of its own, beside this one: a large search takes two cores.

A process is forked, computes, and sends what it found. Where there is one core, or there are threads that a fork would
leave behind, or that process fails, the work is done here instead, when its result is asked for; it is the same.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def beside(work: Callable[[], Result]) -> Callable[[], Result]:
    """Begin it; what is returned waits for its result."""
    if not may_fork():
        return work
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        _work(work, writing)
    os.close(writing)

    def result() -> Result:
        with os.fdopen(reading, "rb") as pipe:
            sent = pipe.read()
        os.waitpid(process, 0)
        return pickle.loads(sent) if sent else work()  # noqa: S301 (a child of this process wrote it)

    return result


def may_fork() -> bool:
    """Not beside a torch, whose threads Python does not know of."""
    if not hasattr(os, "fork") or "torch" in sys.modules or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else False


def _work(work: Callable[[], Any], writing: int) -> None:
    """In the new process, which ends here whatever happens: nothing of its parent's is written or tidied up twice."""
    try:
        gc.freeze()  # what the parent has thrown away is not tidied up here either
        found = pickle.dumps(work(), pickle.HIGHEST_PROTOCOL)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(found)
    finally:
        os._exit(0)
