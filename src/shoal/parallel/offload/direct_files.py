"""Files of tensors on a local disk, read and written in the background with direct I/O.

Direct: past the system's cache, which would take memory beside what the caller owns and copy every byte once more. A
few threads keep several blocks of a file on their way at once; the system's calls and the hash let go of the
interpreter's lock meanwhile. Every block's BLAKE3 hash is kept in memory and compared when the block is read.

Buffers are the caller's, from ``aligned``: while a transfer runs, its buffer is not to be touched.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from shoal.parallel.offload.host_memory import pinned
from shoal.parallel.offload.scratch import BLOCK

# What is hashed, read and written at once.
PIECE = 8 << 20
THREADS = 4


class ScratchDamaged(RuntimeError):
    """A disk gave back other bytes than it was given."""


@dataclass
class DirectFile:
    """One tensor's file."""

    path: Path
    handle: int
    size: int  # of the tensor, in bytes
    hashes: list[bytes | None]  # of every piece; None: never written
    # The last transfer of every piece: the next one waits for it.
    last: list[Future[None] | None] = field(default_factory=list)


class DiskTransfer:
    """A read or a write that runs in the background."""

    def __init__(self, pieces: list[Future[None]]) -> None:
        self._pieces = pieces

    def done(self) -> bool:
        return all(one.done() for one in self._pieces)

    def result(self) -> None:
        """Wait for its end; raises what went wrong: an ``OSError`` that names the file, or ``ScratchDamaged``."""
        # All of them, before any is raised: afterwards no thread touches the buffer.
        wait(self._pieces)
        for one in self._pieces:
            one.result()


class DirectFiles:
    """The files of one scratch directory, each of a size of its own that never changes."""

    def __init__(self, directory: Path, threads: int = THREADS) -> None:
        self.directory = directory
        self._files: dict[str, DirectFile] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="scratch")

    @property
    def bytes(self) -> int:
        """On the disk."""
        return sum(_whole_blocks(file.size) for file in self._files.values())

    def make(self, name: str, size: int) -> None:
        """A file for a tensor of so many bytes. Its room is taken now: a disk that is too small says so here."""
        path = self.directory / name
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, max(BLOCK, _whole_blocks(size)))
        except OSError as error:
            os.close(handle)
            raise OSError(error.errno, error.strerror, str(path)) from None
        count = -(-size // PIECE)
        self._files[name] = DirectFile(path, handle, size, [None] * count, [None] * count)

    def write(self, name: str, tensor: Tensor) -> DiskTransfer:
        """Write a whole tensor, which lies in an aligned buffer, into its file."""
        return self._start(name, tensor, self._write_piece)

    def read(self, name: str, tensor: Tensor) -> DiskTransfer:
        """Read it back, into an aligned buffer."""
        if any(one is None for one in self._files[name].last):
            raise ValueError(f"{name} was never written")
        return self._start(name, tensor, self._read_piece)

    def close(self) -> None:
        """Wait for what runs, and let go of the files; their directory removes them."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            os.close(file.handle)
        self._files.clear()

    def _start(
        self, name: str, tensor: Tensor, move: Callable[[DirectFile, int, memoryview], None]
    ) -> DiskTransfer:
        file, view = self._files[name], _memory(tensor, self._files[name].size)
        started = []
        for number, before in enumerate(file.last):
            piece = view[number * PIECE : (number + 1) * PIECE]
            job = self._pool.submit(_after, before, move, file, number, piece)
            file.last[number] = job
            started.append(job)
        return DiskTransfer(started)

    @staticmethod
    def _write_piece(file: DirectFile, number: int, memory: memoryview) -> None:
        file.hashes[number] = _hash(file, number, memory)
        _move(os.pwritev, file, number * PIECE, memory)

    @staticmethod
    def _read_piece(file: DirectFile, number: int, memory: memoryview) -> None:
        _move(os.preadv, file, number * PIECE, memory)
        if _hash(file, number, memory) != file.hashes[number]:
            raise ScratchDamaged(
                f"{file.path} gave back other bytes than were written to it, from byte {number * PIECE:,} on: "
                "the disk is failing; offload.scratch = a directory on another one"
            )


def aligned(size: int, device: torch.device) -> Tensor:
    """A buffer that direct I/O takes, of so many bytes, pinned for copies to and from a CUDA device."""
    return pinned(_whole_blocks(size), device, in_whole_pages=True)[:size]


def _after(
    before: Future[None] | None,
    move: Callable[[DirectFile, int, memoryview], None],
    file: DirectFile,
    number: int,
    memory: memoryview,
) -> None:
    """What was asked for earlier of the same piece comes first: it was started before, so it is under way."""
    if before is not None:
        wait([before])
    move(file, number, memory)


def _move(call: Callable[..., int], file: DirectFile, start: int, memory: memoryview) -> None:
    """All of the memory, however little of it the system moves at a time."""
    done = 0
    while done < len(memory):
        try:
            moved = call(file.handle, [memory[done:]], start + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file.path)) from None
        # It goes on at a whole block. The last one of a full disk is never whole.
        moved -= moved % BLOCK
        if moved == 0:
            kind = errno.ENOSPC if call is os.pwritev else errno.EIO
            raise OSError(kind, os.strerror(kind), str(file.path))
        done += moved


def _hash(file: DirectFile, number: int, memory: memoryview) -> bytes:
    """Of what is the tensor's, without what fills the last block."""
    return blake3(memory[: file.size - number * PIECE]).digest()


def _memory(tensor: Tensor, size: int) -> memoryview:
    """A tensor's bytes, up to the end of their last block."""
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.numel() != size or flat.data_ptr() != tensor.data_ptr():
        raise ValueError(f"a file of {size:,} bytes is given a tensor of {flat.numel():,} or with gaps")
    storage, offset = flat.untyped_storage(), flat.storage_offset()
    whole = _whole_blocks(size)
    if flat.data_ptr() % BLOCK or storage.nbytes() - offset < whole:
        raise ValueError("direct I/O takes buffers from aligned() alone")
    padded = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (whole,), (1,))
    memory: memoryview = padded.numpy().data
    return memory


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
