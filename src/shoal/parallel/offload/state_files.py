"""States in files: master weights and moments of offloaded pieces on a local disk (``offload=optimizer@nvme``).

With ``offload=params@nvme`` their gradients are in files too while they wait for the gradient norm, and are read
together with the states.

An update walks through the states in forward order, a stretch at a time: read ahead, updated, written behind, through a
ring in host memory. So disk and host cores work at the same time, and memory holds a bounded part of the states. All
other readers (checkpoints, guards, proofs) ask for a piece's state by name and get a copy, one piece at a time.

A state in a file is represented by an ``absent`` tensor: it has a shape and a dtype, takes no memory, reads as NaN
(bytes of packed weights as zeros), and cannot be written to.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.facts.layout.offload import RING, STRETCHES, ring_elements
from shoal.parallel.offload.direct_files import PIECE, Files, FileTransfer, wait_for_part
from shoal.parallel.offload.host_memory import HostBuffer, HostMemory
from shoal.parallel.offload.scratch import BLOCK
from shoal.parallel.shards import Shard, goes_home

WEIGHT = "weight"
GRADIENT = "gradient"


def absent(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A CPU tensor without memory of its own."""
    nothing = math.nan if dtype.is_floating_point else 0
    return torch.full((), nothing, dtype=dtype, device="cpu").expand(shape)


def new_weights(piece: Shard, gradient: Tensor) -> Tensor:
    """A view for the piece's new working-copy values: they overwrite the gradient, which is at least as wide."""
    assert piece.working is not None
    return gradient.view(torch.uint8).view(piece.working.dtype)[: gradient.numel()]


@dataclass(frozen=True)
class FileStretch:
    """Consecutive elements of a piece that are in memory together."""

    piece: Shard
    start: int
    stop: int


@dataclass
class FileSection:
    """A stretch's place in the ring: bytes ``start`` to ``stop``."""

    stretch: FileStretch
    start: int
    stop: int
    values: dict[str, Tensor]
    moving: list[FileTransfer] = field(default_factory=list)
    updated: bool = False  # being written; its place is free when that has ended

    def settle(self) -> None:
        for one in self.moving:
            one.result()
        self.moving = []


class PieceOnDisk:
    """One piece's state files."""

    def __init__(self, piece: Shard, number: int, files: Files) -> None:
        """Move the piece's master weights to a file; their values come later."""
        self.kinds: dict[str, torch.dtype] = {}
        self._files, self._number = files, number
        self._shape, self._dtype = piece.tensor.shape, piece.tensor.dtype
        self.size = piece.tensor.numel()
        self._written: dict[str, int] = {}  # elements written so far, from the first on; the others are zeros
        piece.tensor, piece.filed = nn.Parameter(self.begin(WEIGHT)), self

    def begin(self, kind: str) -> Tensor:
        """Start a state as zeros; returns the tensor that stands for it."""
        return self._begin(kind, self._dtype)

    def begin_gradient(self, dtype: torch.dtype) -> str:
        """The name of the file for a gradient of this dtype."""
        if self.kinds.get(GRADIENT, dtype) != dtype:
            self._files.remove(self._name(GRADIENT))
            del self.kinds[GRADIENT]
        self._begin(GRADIENT, dtype)
        self._written[GRADIENT] = self.size
        return self._name(GRADIENT)

    def _begin(self, kind: str, dtype: torch.dtype) -> Tensor:
        if kind not in self.kinds:
            self.kinds[kind] = dtype
            self._files.make(self._name(kind), self.size * dtype.itemsize)
        self._written[kind] = 0
        return absent(self._shape, dtype)

    def read(self, kind: str) -> Tensor:
        """A copy of a state, owned by the caller."""
        if not self._written[kind]:
            return torch.zeros(self._shape, dtype=self.kinds[kind], device="cpu")
        values = self._room(kind)
        self._files.read(self._name(kind), values).result()
        return values

    def write(self, kind: str, values: Tensor) -> None:
        """Set the values of a state."""
        there = self._room(kind)
        there.copy_(values.detach())
        self._files.write(self._name(kind), there).result()
        self._written[kind] = self.size

    def mapped(self, size: int) -> Tensor:
        return self._files.mapped(size)

    def start_read(self, kind: str, start: int, into: Tensor) -> list[FileTransfer]:
        """Start reading some elements of a state, from ``start`` on, in the background."""
        if start >= self._written[kind]:
            into.zero_()
            return []
        return [self._files.read(self._name(kind), into, start * into.element_size())]

    def start_write(self, kind: str, start: int, values: Tensor) -> FileTransfer:
        self._written[kind] = max(self._written[kind], start + values.numel())
        return self._files.write(self._name(kind), values, start * values.element_size())

    def _room(self, kind: str) -> Tensor:
        dtype = self.kinds[kind]
        room = self._files.room(HostMemory(torch.device("cpu")), self.size * dtype.itemsize)
        return room.bytes.view(dtype).view(self._shape)

    def _name(self, kind: str) -> str:
        return f"{self._number:05d}.{kind}"


class StateFiles:
    """The pieces of a rank whose states are in files."""

    def __init__(self, pieces: Sequence[Shard], files: Files, memory: HostMemory) -> None:
        self.files, self._memory = files, memory
        self.filed = {piece: PieceOnDisk(piece, number, files) for number, piece in enumerate(pieces)}
        self._stretches: list[FileStretch] = []
        self._next = 0  # the next to read
        self._ring: HostBuffer | None = None
        self._held: deque[FileSection] = deque()  # in the order of their places in the ring

    def in_order(self, pieces: Sequence[Shard]) -> None:
        """Set the order in which updates will go."""
        self._stretches = [stretch for piece in pieces for stretch in self._cut(piece)]

    def begin(self) -> None:
        """Start reading ahead: an update is about to come."""
        self.finish()
        self._next = 0
        size = self._ring_bytes()
        if self._ring is None or self._ring.bytes.numel() < size:
            if self._ring is not None:
                self._memory.release(self._ring)
            self._ring = self.files.room(self._memory, size)
        self._read_ahead()

    def lent(self, piece: Shard) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield a piece's states, stretch by stretch, with the index of each stretch's first element. Changes are
        written back.

        Ask for all pieces, in order. If a gradient is among the states, the caller overwrites it with the new weights,
        which are then written to where the weights live.
        """
        for stretch in self._cut(piece):
            section = self._read(stretch)
            yield stretch.start, dict(section.values)
            filed, rests = self.filed[piece], goes_home(piece)
            section.moving = [
                filed.start_write(kind, stretch.start, values)
                for kind, values in section.values.items()
                if kind != GRADIENT
            ]
            if rests is not None:
                section.moving.append(
                    rests.start_write(stretch.start, new_weights(piece, section.values[GRADIENT]))
                )
            section.updated = True
            self._read_ahead()

    def finish(self) -> None:
        """Wait until everything is written; raises any error."""
        while self._held:
            self._held.popleft().settle()

    def _read(self, stretch: FileStretch) -> FileSection:
        """Wait for a stretch to be in memory. Meanwhile, sections that have been written make room for later reads."""
        while True:
            self._read_ahead()
            section = next((one for one in self._held if one.stretch == stretch), None)
            if section is not None and all(one.done() for one in section.moving):
                section.settle()
                return section
            wait_for_part(one for held in self._held for one in held.moving)

    def _cut(self, piece: Shard) -> Iterator[FileStretch]:
        """Cut at boundaries of what is hashed at once, also in the file with the narrowest dtype."""
        assert piece.working is not None
        each = PIECE // min(piece.tensor.element_size(), piece.working.element_size())
        step = max(each, RING // STRETCHES // each * each)
        size = self.filed[piece].size
        for start in range(0, size, step):
            yield FileStretch(piece, start, min(start + step, size))

    def _bytes(self, stretch: FileStretch) -> int:
        count, kinds = stretch.stop - stretch.start, self.filed[stretch.piece].kinds
        return sum(-(-count * dtype.itemsize // BLOCK) * BLOCK for dtype in kinds.values())

    def _ring_bytes(self) -> int:
        elements = sum(filed.size for filed in self.filed.values())
        each = max(sum(dtype.itemsize for dtype in filed.kinds.values()) for filed in self.filed.values())
        wanted = int(min(RING, ring_elements(elements, 0))) * each
        return max(wanted // BLOCK * BLOCK, *map(self._bytes, self._stretches))

    def _read_ahead(self) -> None:
        """Read ahead as far as there is room."""
        while self._next < len(self._stretches):
            stretch = self._stretches[self._next]
            if (start := self._place(self._bytes(stretch))) is None:
                return
            self._held.append(self._start(stretch, start))
            self._next += 1

    def _place(self, size: int) -> int | None:
        """Where in the ring ``size`` bytes are free; None if nowhere yet."""
        assert self._ring is not None
        while self._held and self._held[0].updated and all(one.done() for one in self._held[0].moving):
            self._held.popleft().settle()
        if not self._held:
            return 0
        first, last, length = self._held[0].start, self._held[-1].stop, self._ring.bytes.numel()
        if self._held[-1].start < first:  # wrap around
            return last if last + size <= first else None
        if last + size <= length:
            return last
        return 0 if size <= first else None

    def _start(self, stretch: FileStretch, start: int) -> FileSection:
        assert self._ring is not None
        filed = self.filed[stretch.piece]
        count, at = stretch.stop - stretch.start, start
        section = FileSection(stretch, start, start + self._bytes(stretch), {})
        for kind, dtype in filed.kinds.items():
            values = self._ring.bytes[at : at + count * dtype.itemsize].view(dtype)
            section.values[kind] = values
            section.moving += filed.start_read(kind, stretch.start, values)
            at += -(-count * dtype.itemsize // BLOCK) * BLOCK
        return section
