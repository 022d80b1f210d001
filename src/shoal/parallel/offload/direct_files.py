"""Files of tensors on a local disk, read and written in the background with direct I/O.

Direct I/O bypasses the page cache, which would take memory beyond what the caller owns and copy every byte once more. A
few threads keep several blocks of a file in flight; system calls and hashing release the GIL. Every block's BLAKE3 hash
is kept in memory and checked when the block is read.

Reads and writes have separate threads: a step waits for reads, which would otherwise queue behind all pending writes;
and while some threads hash, others keep the disk busy.

Buffers belong to the caller and come from ``aligned``; do not touch one while its transfer runs.
"""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from blake3 import blake3
from torch import Tensor

from shoal.facts.layout.offload import STAGED, STAGES
from shoal.parallel.offload.host_memory import HostBuffer, HostMemory, whole_pages
from shoal.parallel.offload.scratch import BLOCK, Scratch

# Bytes that are hashed, read and written at once.
PIECE, THREADS = STAGED, STAGES


class FileTransfer(Protocol):
    """A read or a write in progress."""

    @property
    def parts(self) -> Sequence[Future[None]]:
        """The parts that run, or ran, concurrently."""

    def done(self) -> bool: ...

    def result(self) -> None:
        """Wait for completion; raises any error."""


class FilePart(Protocol):
    """One unit of I/O: bytes ``start`` to ``stop`` of a tensor's file."""

    start: int
    stop: int

    def read(self, buffer: Tensor) -> None:
        """Read into the beginning of an aligned buffer. Raises any error."""

    def write(self, buffer: Tensor) -> None:
        """Write from the beginning of an aligned buffer."""


class Files(Protocol):
    """Storage for tensors that do not fit in host memory. A dry run's has only sizes."""

    @property
    def content(self) -> int:
        """Total bytes of all tensors that have a file."""

    def make(self, name: str, size: int) -> None: ...

    def room(self, memory: HostMemory, size: int) -> HostBuffer:
        """A buffer that tensors are written from and read into."""

    def write(
        self, name: str, tensor: Tensor, start: int = 0, after: Callable[[], None] | None = None
    ) -> FileTransfer: ...

    def read(
        self, name: str, tensor: Tensor, start: int = 0, after: Callable[[], None] | None = None
    ) -> FileTransfer: ...

    def each(self, name: str, move: Callable[[FilePart], None], writes: bool) -> FileTransfer:
        """Apply ``move`` to all parts of a file, a few at a time; calls for one part run in order. ``writes``: not
        read-only.
        """

    def remove(self, name: str) -> None: ...

    def mapped(self, size: int) -> Tensor:
        """``size`` bytes on the disk, memory-mapped; freed with the tensor."""

    def close(self) -> None: ...


class ScratchDamaged(RuntimeError):
    """A disk returned different bytes than were written, or failed to return any."""


@dataclass
class DirectFile:
    """One tensor's file."""

    path: Path
    handle: int
    size: int  # of the tensor, in bytes
    hashes: list[bytes | None]  # of every piece; None: never written
    # The last transfer of every piece; the next one waits for it.
    last: list[Future[None] | None] = field(default_factory=list)


class DiskPart:
    """One of a file's pieces."""

    def __init__(self, file: DirectFile, number: int) -> None:
        self._file, self._number = file, number
        self.start = number * PIECE
        self.stop = min(file.size, self.start + PIECE)

    def read(self, buffer: Tensor) -> None:
        _read_piece(self._file, self._number, _memory(buffer[: self.stop - self.start]))

    def write(self, buffer: Tensor) -> None:
        _write_piece(self._file, self._number, _memory(buffer[: self.stop - self.start]))


class DiskTransfer:
    """A read or a write running in the background."""

    def __init__(self, pieces: list[Future[None]]) -> None:
        self.parts = pieces

    def done(self) -> bool:
        return all(one.done() for one in self.parts)

    def result(self) -> None:
        """Wait for completion. Raises an ``OSError`` that names the file, or ``ScratchDamaged``."""
        # Wait for all before raising, so that no thread touches the buffer afterwards.
        wait(self.parts)
        for one in self.parts:
            one.result()


def wait_for_part(transfers: Iterable[FileTransfer]) -> None:
    """Wait until one more part of the running transfers has ended; returns at once if none is running."""
    if going := [one for transfer in transfers for one in transfer.parts if not one.done()]:
        wait(going, return_when=FIRST_COMPLETED)


class DirectFiles:
    """The files of one scratch directory, each of a fixed size."""

    def __init__(self, directory: Path, threads: int = THREADS, scratch: Scratch | None = None) -> None:
        """``scratch``: the directory's owner; it is removed with the files."""
        self.directory, self._scratch = directory, scratch
        # One file is open per tensor: up to five per parameter, where a process often may have only 1,024 by default.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._files: dict[str, DirectFile] = {}
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="scratch-read")
        self._writers = ThreadPoolExecutor(threads, thread_name_prefix="scratch-write")

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(_whole_blocks(file.size) for file in self._files.values())

    @property
    def content(self) -> int:
        """Bytes of the tensors, without the padding of their last blocks."""
        return sum(file.size for file in self._files.values())

    def mapped(self, size: int) -> Tensor:
        """Through the page cache, which the system shrinks when memory is scarce."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        with tempfile.NamedTemporaryFile(dir=self.directory) as file:
            try:
                os.posix_fallocate(
                    file.fileno(), 0, size
                )  # a page the disk has no room for would kill the process
            except OSError as error:
                raise OSError(error.errno, error.strerror, file.name) from None
            return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)

    def room(self, memory: HostMemory, size: int) -> HostBuffer:
        return memory.take(size, in_whole_pages=True)

    def make(self, name: str, size: int) -> None:
        """Create a file for a tensor of ``size`` bytes. Space is allocated now, so a disk that is too small fails
        here.
        """
        path = self.directory / name
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, max(BLOCK, _whole_blocks(size)))
        except OSError as error:
            os.close(handle)
            raise OSError(error.errno, error.strerror, str(path)) from None
        count = -(-size // PIECE)
        self._files[name] = DirectFile(path, handle, size, [None] * count, [None] * count)

    def write(
        self, name: str, tensor: Tensor, start: int = 0, after: Callable[[], None] | None = None
    ) -> DiskTransfer:
        """Write a tensor in an aligned buffer to its file, from byte ``start`` on.

        Write up to the file's end or in whole pieces. ``after`` blocks until the tensor has its values.
        """
        return self._start(self._writers, name, tensor, start, _write_piece, after)

    def read(
        self, name: str, tensor: Tensor, start: int = 0, after: Callable[[], None] | None = None
    ) -> DiskTransfer:
        """Read it back into an aligned buffer. ``after`` blocks until the buffer is free."""
        file = self._files[name]
        if any(file.last[number] is None for number in _pieces(file, tensor, start)):
            raise ValueError(f"{name} was never written")
        return self._start(self._readers, name, tensor, start, _read_piece, after)

    def each(self, name: str, move: Callable[[FilePart], None], writes: bool) -> DiskTransfer:
        file = self._files[name]
        moves = {number: partial(move, DiskPart(file, number)) for number in range(len(file.last))}
        return _submit(self._writers if writes else self._readers, file, moves)

    def remove(self, name: str) -> None:
        """Delete a file after its pending transfers."""
        file = self._files.pop(name)
        wait([one for one in file.last if one is not None])
        os.close(file.handle)
        file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Wait for running transfers and close the files; their directory removes them."""
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            os.close(file.handle)
        self._files.clear()
        if self._scratch is not None:
            self._scratch.remove()

    def _start(
        self,
        pool: ThreadPoolExecutor,
        name: str,
        tensor: Tensor,
        start: int,
        move: Callable[[DirectFile, int, memoryview], None],
        after: Callable[[], None] | None = None,
    ) -> DiskTransfer:
        file = self._files[name]
        view, moves = _memory(tensor), {}
        for number in _pieces(file, tensor, start):
            piece = view[number * PIECE - start : (number + 1) * PIECE - start]
            moves[number] = partial(move, file, number, piece)
        return _submit(pool, file, moves, after)


def _submit(
    pool: ThreadPoolExecutor,
    file: DirectFile,
    moves: Mapping[int, Callable[[], None]],
    after: Callable[[], None] | None = None,
) -> DiskTransfer:
    """Submit transfers; those of one piece run in the order they were submitted, so whatever waits, waits for one
    that has started.
    """
    for number, move in moves.items():
        file.last[number] = pool.submit(_after, file.last[number], after, move)
    return DiskTransfer([job for number in moves if (job := file.last[number]) is not None])


def _write_piece(file: DirectFile, number: int, memory: memoryview) -> None:
    file.hashes[number] = _hash(file, number, memory)
    _move(os.pwritev, file, number * PIECE, memory)


def _read_piece(file: DirectFile, number: int, memory: memoryview) -> None:
    _move(os.preadv, file, number * PIECE, memory)
    if _hash(file, number, memory) != file.hashes[number]:
        raise _damaged(
            f"{file.path} gave back other bytes than were written to it, from byte {number * PIECE:,} on"
        )


def aligned(size: int, device: torch.device) -> Tensor:
    """A buffer of ``size`` bytes for direct I/O, pinned for copies to and from a CUDA device."""
    return whole_pages(size, device)


def _after(
    before: Future[None] | None,
    after: Callable[[], None] | None,
    move: Callable[[], None],
) -> None:
    if before is not None:
        with suppress(CancelledError):  # ``wait`` would miss a cancellation
            before.exception()
    if after is not None:
        after()
    move()


def _move(call: Callable[..., int], file: DirectFile, start: int, memory: memoryview) -> None:
    """Read or write all of ``memory``, however little the system moves per call."""
    done = 0
    while done < len(memory):
        try:
            moved = call(file.handle, [memory[done:]], start + done)
        except OSError as error:
            raise _failed(error.errno or errno.EIO, file, start + done) from None
        # Continue at a whole block. The last block on a full disk is never whole.
        moved -= moved % BLOCK
        if moved == 0:
            raise _failed(errno.ENOSPC if call is os.pwritev else errno.EIO, file, start + done)
        done += moved


def _failed(kind: int, file: DirectFile, start: int) -> Exception:
    if kind == errno.EIO:
        return _damaged(f"{file.path} cannot be read or written from byte {start:,} on ({os.strerror(kind)})")
    return OSError(kind, os.strerror(kind), str(file.path))


def _damaged(what: str) -> ScratchDamaged:
    return ScratchDamaged(f"{what}: the disk is failing; offload.scratch = a directory on another one")


def _hash(file: DirectFile, number: int, memory: memoryview) -> bytes:
    """Hash the tensor's bytes, without the padding of the last block."""
    return blake3(memory[: file.size - number * PIECE]).digest()


def _pieces(file: DirectFile, tensor: Tensor, start: int) -> range:
    """The indices of the pieces that a tensor covers, from byte ``start`` on."""
    end = start + tensor.nbytes
    if start % PIECE or end > file.size or (end < file.size and end % PIECE):
        held = f"a file of {file.size:,} bytes"
        raise ValueError(f"{held} is given a tensor of {tensor.nbytes:,} at {start:,}")
    return range(start // PIECE, -(-end // PIECE))


def _memory(tensor: Tensor) -> memoryview:
    """A tensor's bytes, up to the end of their last block."""
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.numel() and flat.data_ptr() != tensor.data_ptr():
        raise ValueError("direct I/O takes tensors without gaps")
    storage, offset = flat.untyped_storage(), flat.storage_offset()
    whole = _whole_blocks(flat.numel())
    if flat.data_ptr() % BLOCK or storage.nbytes() - offset < whole:
        raise ValueError("direct I/O takes buffers from aligned() alone")
    padded = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (whole,), (1,))
    memory: memoryview = padded.numpy().data
    return memory


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
