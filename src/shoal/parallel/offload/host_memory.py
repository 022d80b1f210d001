"""The host's memory as a place to wait in: pinned buffers, used again and again.

Pinned, so that copies to and from a GPU run beside its kernels. Torch's own pinned allocator rounds every size up to a
power of two, which would cost up to twice the memory: buffers are taken from the system as large as they are asked for
and then registered with CUDA. On a CPU a buffer is ordinary memory, and all else is the same.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Of <malloc.h>: what the end of a heap may keep free, and from which size on a block is mapped by itself.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# While first values are made, whose temporaries of 512 KiB would cost a page fault every 4 KiB; and in steps, as glibc
# begins.
LARGE_AT_FIRST, LARGE = 1 << 20, 1 << 17


class HostThread:
    """Does what the host has to do beside a device, one thing after the other. On a CPU it is done at once."""

    def __init__(self, name: str, device: torch.device, threads: int | None = None) -> None:
        """``threads``: that torch's operators may use in it."""
        self._pool: ThreadPoolExecutor | None = None
        if device.type != "cpu":
            self._pool = ThreadPoolExecutor(1, name, partial(_begin, device, threads))

    @property
    def beside(self) -> bool:
        """Whether what it does goes on beside who asked for it."""
        return self._pool is not None

    def submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        if self._pool is not None:
            return self._pool.submit(work, *arguments)
        done: Future[None] = Future()
        work(*arguments)
        done.set_result(None)
        return done


def _begin(device: torch.device, threads: int | None) -> None:
    # A new thread would begin with the first device, and leave a context of its own there.
    if device.index is not None:
        torch.cuda.set_device(device)
    if threads is not None:
        torch.set_num_threads(threads)


@dataclass(eq=False)
class HostBuffer:
    """Some bytes."""

    bytes: Tensor  # uint8
    # The end of the copies that last read it: a stream that writes into it waits for that.
    read: torch.cuda.Event | None = None
    in_whole_pages: bool = False  # as direct I/O wants it

    def like(self, tensor: Tensor) -> Tensor:
        """Its bytes in the shape, the strides and the type of a tensor that is as large."""
        return self.bytes.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class HostMemory:
    """One rank's buffers. Those given back are taken again by what has their size: a steady state makes none."""

    def __init__(self, device: torch.device) -> None:
        """``device``: whose copies the buffers are pinned for."""
        self.device = device
        self.buffers: list[Tensor] = []  # all that there are
        self._free: dict[tuple[int, bool], list[HostBuffer]] = {}

    @property
    def bytes(self) -> int:
        """Taken from the system."""
        return sum(one.numel() for one in self.buffers)

    def take(self, size: int, in_whole_pages: bool = False) -> HostBuffer:
        """A buffer of exactly so many bytes, or up to the end of their last page. What it holds is anything."""
        free = self._free.get((size, in_whole_pages))
        if free:
            return free.pop()
        made = whole_pages(size, self.device) if in_whole_pages else pinned(size, self.device)
        self.buffers.append(made)
        return HostBuffer(made, in_whole_pages=in_whole_pages)

    def release(self, buffer: HostBuffer) -> None:
        """None of its size will be wanted again."""
        self.buffers = [one for one in self.buffers if one is not buffer.bytes]

    def give_back(self, buffer: HostBuffer) -> None:
        self._free.setdefault((buffer.bytes.numel(), buffer.in_whole_pages), []).append(buffer)


def give_back_large_blocks(size: int) -> None:
    """From now on what this process frees of this size or more goes back to the system at once; now, all that is free.

    glibc would keep it: where weights come and go, small tensors that stay settle in the holes that these leave, and a
    process grows by what it has freed. By itself it raises both limits, to 32 and 64 MiB, as large blocks are freed: to
    be called before there are any, for a hole in a heap is used again whatever the limits are. And as torch asks for
    aligned blocks, holes of glibc 2.36 and older do not fit the next block of the same size. Other libraries of C have
    no such settings.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, size)
        library.mallopt(M_TRIM_THRESHOLD, size)
    give_back_what_is_free()


def give_back_what_is_free() -> None:
    """To the system, from between what is used as well."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def pinned(size: int, device: torch.device, in_whole_pages: bool = False) -> Tensor:
    """So many bytes of the host's memory, pinned for a CUDA device; for any other as they are.

    ``in_whole_pages``: in pages of their own in any case, as direct I/O wants them.
    """
    on_gpu = device.type == "cuda"
    if not size or not (on_gpu or in_whole_pages):
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    # The mapping lives as long as the tensor.
    made = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    if on_gpu:
        _register(made)
    return made


def whole_pages(size: int, device: torch.device) -> Tensor:
    """So many bytes that direct I/O takes: the rest of their last page is there too."""
    return pinned(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, device, in_whole_pages=True)[:size]


def _register(memory: Tensor) -> None:
    runtime, start = torch.cuda.cudart(), memory.data_ptr()
    error = int(runtime.cudaHostRegister(start, memory.numel(), 0))
    if error:
        raise MemoryError(f"the host could not pin {memory.numel():,} bytes for offload (CUDA error {error})")
    # A storage's Python object lives as long as the storage: its pages go back to the system unpinned.
    weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, start).atexit = False
