"""Time copies between device and host, and to and from the cache's disk."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path
from queue import SimpleQueue
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.parallel.offload.direct_files import PIECE as AT_ONCE
from shoal.parallel.offload.direct_files import THREADS, DirectFiles, FilePart, aligned
from shoal.parallel.offload.scratch import direct_problem

TIMES = 7
PIECE = 2**26
# A file written and read once is at most this large; the time is limited too.
LARGEST_FILE = 2**30
LONGEST = 4.0


def to_and_from(device: torch.device, size: int) -> tuple[float, float] | None:
    """Bytes/s to the device and back, through pinned memory; None if host and device are one."""
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


class DiskRates(NamedTuple):
    """Bytes/s."""

    write: float
    read: float
    # Of half the files, while the others are written: together. None: through the page cache.
    both: float | None


def disk(folder: Path) -> DiskRates:
    """Bytes/s written and read as in offload: direct I/O, hashed, several pieces at a time; and both at once, as
    an update does.

    Falls back to the page cache.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".disk-") as name:
        place = Path(name)
        return past_the_cache(place) if direct_problem(place) is None else through_the_cache(place)


def past_the_cache(place: Path) -> DiskRates:
    """With direct I/O. Files are overwritten, as in every step: the first write takes longer."""
    files, names = DirectFiles(place), list[str]()
    free: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(2 * THREADS):
        free.put(aligned(AT_ONCE, torch.device("cpu")))

    def write(part: FilePart) -> None:
        part.write(buffer := free.get())
        free.put(buffer)

    def read(part: FilePart) -> None:
        part.read(buffer := free.get())
        free.put(buffer)

    def rate(to_write: list[str], to_read: list[str]) -> float:
        start = time.perf_counter()
        sides = [(name, write, True) for name in to_write] + [(name, read, False) for name in to_read]
        for moving in [files.each(*side) for side in sides]:
            moving.result()
        return PIECE * len(sides) / (time.perf_counter() - start)

    try:
        start = time.perf_counter()
        while files.content < LARGEST_FILE and (not names or time.perf_counter() - start < LONGEST):
            names.append(str(len(names)))
            files.make(names[-1], PIECE)
            files.each(names[-1], write, writes=True).result()
        half = len(names) // 2
        return DiskRates(rate(names, []), rate([], names), rate(names[:half], names[half:]) if half else None)
    finally:
        files.close()


def through_the_cache(place: Path) -> DiskRates:
    """Through the page cache: written until it is on disk, and read from disk, not from memory."""
    piece = os.urandom(PIECE)  # incompressible, for file systems that compress
    with NamedTemporaryFile(dir=place, buffering=0) as file:
        handle, written = file.fileno(), 0
        start = time.perf_counter()
        while written < LARGEST_FILE and (written < PIECE or time.perf_counter() - start < LONGEST):
            written += file.write(piece)
            os.fdatasync(handle) if hasattr(os, "fdatasync") else os.fsync(handle)
        write = written / (time.perf_counter() - start)
        # Drop what is on disk from memory; systems that cannot do so will read from memory.
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        read = 0
        while (got := len(file.read(PIECE))) and time.perf_counter() - start < LONGEST:
            read += got
        return DiskRates(write, max(read, 1) / (time.perf_counter() - start), None)
