"""The floor of what waits in files: as many bytes read and written past the system's cache, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from shoal.parallel.offload.direct_files import PIECE, THREADS, aligned

Side = tuple[Callable[..., int], int]  # a call of the system's, and the file


class DirectCopy:
    """Two files of so many bytes: one is read, the other written at the same time."""

    def __init__(self, place: Path, size: int) -> None:
        self._count = -(-size // PIECE)
        self._free = [aligned(PIECE, torch.device("cpu")) for _ in range(2 * THREADS)]
        self._handles = []
        for name in ("read", "written"):
            handle = os.open(place / name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(handle, 0, self._count * PIECE)
            self._handles.append(handle)
        source, target = self._handles
        self._both((os.pwritev, source), (os.pwritev, target))

    def seconds(self) -> float:
        """Of a read and a write at once, of all bytes each."""
        source, target = self._handles
        began = time.perf_counter()
        self._both((os.preadv, source), (os.pwritev, target))
        return time.perf_counter() - began

    def _both(self, *sides: Side) -> None:
        """Each by as many threads as the files of a rank have for it."""
        pools = [ThreadPoolExecutor(THREADS) for _ in sides]
        jobs = [
            pool.submit(self._move, call, handle, number)
            for number in range(self._count)
            for pool, (call, handle) in zip(pools, sides, strict=True)
        ]
        for job in jobs:
            job.result()
        for pool in pools:
            pool.shutdown()

    def _move(self, call: Callable[..., int], handle: int, number: int) -> None:
        buffer = self._free.pop()
        assert call(handle, [buffer.numpy().data], number * PIECE) == PIECE
        self._free.append(buffer)
