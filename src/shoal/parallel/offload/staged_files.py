"""Move tensors between files and any memory, through a few direct-I/O buffers, one per part in flight.

The files' threads move one part at a time: a read fills a buffer, is checked against its hash, and is copied to its
destination; a write goes the other way. So the extra memory is bounded, however large the tensors are.
"""

from __future__ import annotations

import ctypes
from queue import SimpleQueue

import torch
from torch import Tensor

from shoal.facts.layout.offload import STAGED, STAGES
from shoal.parallel.offload.direct_files import FilePart, Files, FileTransfer
from shoal.parallel.offload.host_memory import HostMemory


class StagedFiles:
    """Sends tensors to files and fetches them, asynchronously.

    Do not touch a tensor until its transfer has ended.
    """

    def __init__(self, files: Files, memory: HostMemory) -> None:
        self.files, self.memory = files, memory
        # Two streams, so that both directions of a link are used at once.
        self._out, self._back = (
            torch.cuda.Stream(memory.device) if memory.device.type == "cuda" else None for _ in range(2)
        )
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._second: SimpleQueue[Tensor] | None = None
        self._fill(self._free)

    def send(self, name: str, tensor: Tensor) -> FileTransfer:
        """Start writing a tensor to its file."""
        flat, ready = _flat(tensor), _now(tensor)

        def move(part: FilePart) -> None:
            with _Lent(self._free) as buffer:
                self._copy(_bytes(flat, part), buffer, self._out, ready)
                part.write(buffer)

        return self.files.each(name, move, writes=True)

    def fetch(self, name: str, into: Tensor) -> FileTransfer:
        """Start reading it back into a contiguous tensor."""
        flat, ready = into.detach().view(-1).view(torch.uint8), _now(into)

        def move(part: FilePart) -> None:
            with _Lent(self._free) as buffer:
                part.read(buffer)
                self._copy(buffer, _bytes(flat, part), self._back, ready)

        return self.files.each(name, move, writes=False)

    def add(
        self, name: str, tensor: Tensor, wide: torch.dtype, first: bool, squares: dict[int, float]
    ) -> FileTransfer:
        """Start adding a tensor to a file of ``wide`` elements; with ``first``, to zeros.

        ``squares`` receives the sum of squares of each part, keyed by its first byte.
        """
        flat, ready = tensor.detach().reshape(-1), _now(tensor)
        if self._second is None:
            self._fill(second := SimpleQueue[Tensor]())
            self._second = second
        landing = self._second

        def move(part: FilePart) -> None:
            with _Lent(self._free) as buffer, _Lent(landing) as landed:
                coming = flat[part.start // wide.itemsize : part.stop // wide.itemsize]
                here = landed.view(flat.dtype)[: coming.numel()]
                self._copy(coming.view(torch.uint8), landed, self._out, ready)
                total = buffer.view(wide)[: coming.numel()]
                if first:
                    total.copy_(here)
                else:
                    part.read(buffer)
                    total.add_(here)
                squares[part.start] = float(torch.linalg.vector_norm(total).double().square())
                part.write(buffer)

        return self.files.each(name, move, writes=True)

    def _fill(self, queue: SimpleQueue[Tensor]) -> None:
        for _ in range(STAGES):
            queue.put(self.files.room(self.memory, STAGED).bytes)

    def _copy(
        self, source: Tensor, into: Tensor, stream: torch.cuda.Stream | None, ready: torch.cuda.Event | None
    ) -> None:
        """Copy as many bytes as both have. Synchronous, so that waiting for a transfer needs no knowledge of
        streams.
        """
        count = min(source.numel(), into.numel())
        if stream is None:
            # Not with torch, which would start its own threads in each file thread; nor with numpy, because a storage
            # that numpy has viewed cannot be freed.
            ctypes.memmove(into.data_ptr(), source.data_ptr(), count)
            return
        with torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            into[:count].copy_(source[:count], non_blocking=True)
            done = stream.record_event()
        done.synchronize()


class _Lent:
    """A buffer on loan."""

    def __init__(self, queue: SimpleQueue[Tensor]) -> None:
        self._queue = queue

    def __enter__(self) -> Tensor:
        self._buffer = self._queue.get()
        return self._buffer

    def __exit__(self, *_: object) -> None:
        self._queue.put(self._buffer)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _bytes(flat: Tensor, part: FilePart) -> Tensor:
    return flat[part.start : part.stop]


def _now(tensor: Tensor) -> torch.cuda.Event | None:
    """An event after everything issued so far: the tensor then has its values, or its memory is free."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
