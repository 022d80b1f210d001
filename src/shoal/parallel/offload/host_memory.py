"""Pinned host buffers for offloaded tensors, reused again and again.

Pinned, so that copies to and from a GPU overlap with its kernels. Torch's own pinned allocator rounds sizes up to a
power of two, which could double the memory: these buffers are allocated at their exact size and then registered with
CUDA. On a CPU a buffer is ordinary memory; everything else is the same.
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

# From <malloc.h>: how much free memory the end of a heap may keep, and from which size on blocks are mapped separately.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# While weights are initialised, whose temporaries of 512 KiB would otherwise cost a page fault every 4 KiB; and in
# steps, glibc's own initial value.
LARGE_AT_FIRST, LARGE = 1 << 20, 1 << 17


class HostThread:
    """A worker thread for host work that overlaps with a device, one task at a time. On a CPU, work runs
    synchronously.
    """

    def __init__(self, name: str, device: torch.device, threads: int | None = None) -> None:
        """``threads``: how many threads torch's operators may use in it."""
        self._pool: ThreadPoolExecutor | None = None
        if device.type != "cpu":
            self._pool = ThreadPoolExecutor(1, name, partial(_begin, device, threads))

    @property
    def beside(self) -> bool:
        """Whether its work runs concurrently with the caller."""
        return self._pool is not None

    def submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        if self._pool is not None:
            return self._pool.submit(work, *arguments)
        done: Future[None] = Future()
        work(*arguments)
        done.set_result(None)
        return done


def _begin(device: torch.device, threads: int | None) -> None:
    # A new thread would start on the first device and leave a CUDA context there.
    if device.index is not None:
        torch.cuda.set_device(device)
    if threads is not None:
        torch.set_num_threads(threads)


@dataclass(eq=False)
class HostBuffer:
    """A buffer in host memory."""

    bytes: Tensor  # uint8
    # The end of the copies that last read it; a stream that writes to it waits for that.
    read: torch.cuda.Event | None = None
    in_whole_pages: bool = False  # as direct I/O needs it

    def like(self, tensor: Tensor) -> Tensor:
        """Its bytes with the shape, strides and dtype of a tensor of the same size."""
        return self.bytes.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class HostMemory:
    """One rank's buffers. Returned buffers are reused for their size, so the steady state allocates nothing."""

    def __init__(self, device: torch.device) -> None:
        """``device``: the device whose copies the buffers are pinned for."""
        self.device = device
        self.buffers: list[Tensor] = []  # all buffers
        self._free: dict[tuple[int, bool], list[HostBuffer]] = {}

    @property
    def bytes(self) -> int:
        """Total bytes allocated from the system."""
        return sum(one.numel() for one in self.buffers)

    def take(self, size: int, in_whole_pages: bool = False) -> HostBuffer:
        """A buffer of ``size`` bytes, or up to the end of their last page, uninitialised."""
        free = self._free.get((size, in_whole_pages))
        if free:
            return free.pop()
        made = whole_pages(size, self.device) if in_whole_pages else pinned(size, self.device)
        self.buffers.append(made)
        return HostBuffer(made, in_whole_pages=in_whole_pages)

    def release(self, buffer: HostBuffer) -> None:
        """Release a buffer whose size will not be needed again."""
        self.buffers = [one for one in self.buffers if one is not buffer.bytes]

    def give_back(self, buffer: HostBuffer) -> None:
        self._free.setdefault((buffer.bytes.numel(), buffer.in_whole_pages), []).append(buffer)


def give_back_large_blocks(size: int) -> None:
    """Make this process return freed blocks of this size or more to the system at once, and release all free memory
    now.

    glibc would keep them: as weights come and go, small long-lived tensors settle in the holes they leave, and the
    process grows by what it has freed. On its own, glibc raises both limits to 32 and 64 MiB as large blocks are freed.
    Call this before there are any, because holes in a heap are reused whatever the limits are. Torch asks for aligned
    blocks, so holes of glibc 2.36 and older do not fit the next block of the same size. Other C libraries have no such
    settings.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, size)
        library.mallopt(M_TRIM_THRESHOLD, size)
    give_back_what_is_free()


def give_back_what_is_free() -> None:
    """Return free memory to the system, including holes between blocks in use."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def pinned(size: int, device: torch.device, in_whole_pages: bool = False) -> Tensor:
    """``size`` bytes of host memory, pinned for a CUDA device; ordinary memory for any other.

    ``in_whole_pages``: always on pages of its own, as direct I/O needs.
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
    """``size`` bytes for direct I/O: the rest of their last page is allocated too."""
    return pinned(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, device, in_whole_pages=True)[:size]


def _register(memory: Tensor) -> None:
    runtime, start = torch.cuda.cudart(), memory.data_ptr()
    error = int(runtime.cudaHostRegister(start, memory.numel(), 0))
    if error:
        raise MemoryError(f"the host could not pin {memory.numel():,} bytes for offload (CUDA error {error})")
    # A storage's Python object lives as long as the storage, so its pages are unpinned before they return to the
    # system.
    weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, start).atexit = False
