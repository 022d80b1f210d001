"""Run work in a forked child process: a large search uses two cores.

The child computes and sends its result through a pipe. With a single core, with threads that a fork would lose, or if
the child fails, the work runs here instead when its result is requested; the result is the same.
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


def in_other_process(work: Callable[[], Result]) -> Callable[[], Result]:
    """Start the work; the returned function waits for its result."""
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
        return pickle.loads(sent) if sent else work()  # noqa: S301 (written by our own child process)

    return result


def may_fork() -> bool:
    """Whether forking is safe: not with torch loaded, whose threads Python does not know about."""
    if not hasattr(os, "fork") or "torch" in sys.modules or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else False


def _work(work: Callable[[], Any], writing: int) -> None:
    """Runs in the child, which exits here in any case, so that the parent's buffers and finalizers do not run twice."""
    try:
        gc.freeze()  # do not collect the parent's garbage here either
        found = pickle.dumps(work(), pickle.HIGHEST_PROTOCOL)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(found)
    finally:
        os._exit(0)
