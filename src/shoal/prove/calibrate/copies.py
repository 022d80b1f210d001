"""Time copies between device and host, and to and from the cache's disk."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

TIMES = 7
PIECE = 2**26
# A file that is written and read once: no more than this, and no longer.
LARGEST_FILE = 2**30
LONGEST = 4.0


def to_and_from(device: torch.device, size: int) -> tuple[float, float] | None:
    """Bytes/s to the device and back, out of pinned memory; None where host and device are one."""
    if device.type != "cuda":
        return None
    here = torch.empty(size, dtype=torch.uint8).pin_memory()
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return size / _copied(there, here), size / _copied(here, there)


def _copied(target: torch.Tensor, source: torch.Tensor) -> float:
    found = []
    for _ in range(TIMES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found[1:])


def disk(folder: Path) -> tuple[float, float]:
    """Bytes/s written, until the disk has them, and read, not out of memory."""
    folder.mkdir(parents=True, exist_ok=True)
    piece = os.urandom(PIECE)  # a file system that compresses finds nothing here
    with NamedTemporaryFile(dir=folder, prefix=".disk-", buffering=0) as file:
        handle, written = file.fileno(), 0
        start = time.perf_counter()
        while written < LARGEST_FILE and (written < PIECE or time.perf_counter() - start < LONGEST):
            written += file.write(piece)
            os.fdatasync(handle) if hasattr(os, "fdatasync") else os.fsync(handle)
        write = written / (time.perf_counter() - start)
        # What is already on disk may be dropped from memory; where the system does not know how, it is read from there.
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        read = 0
        while (got := len(file.read(PIECE))) and time.perf_counter() - start < LONGEST:
            read += got
        return write, max(read, 1) / (time.perf_counter() - start)
