"""Staging: copy a rank's share to host memory, laid out as its file; training continues once it is copied.

On a GPU even the copy overlaps with the next step, up to the moment when the optimizer would change what is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.facts.problem import first_line
from shoal.parallel.shards import Shard as Held
from shoal.train.checkpoint.manifest import StoredPiece
from shoal.train.checkpoint.write_plan import WrittenBox

# A state's name, and a function that returns its value for each piece of this rank; None if the piece has no such
# state. For a state in a file the returned tensor has no values (``parallel/offload/state_files.py``), and is read when
# it is copied.
States = Sequence[tuple[str, Callable[[Held], Tensor | None]]]


@dataclass(frozen=True)
class StagedBox:
    """One box of one state, and its place in the buffer."""

    state: str
    part: WrittenBox
    dtype: torch.dtype
    position: int

    @property
    def bytes(self) -> int:
        return math.prod(self.part.size) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.position + self.bytes

    def entry(self, file: str, hash: str) -> StoredPiece:
        return StoredPiece(
            tensor=self.part.tensor,
            state=self.state,
            dtype=str(self.dtype).removeprefix("torch."),
            offset=self.part.offset,
            size=self.part.size,
            file=file,
            position=self.position,
            bytes=self.bytes,
            hash=hash,
        )


@dataclass(frozen=True)
class CopyRun:
    """Lots that are contiguous in both their piece and the buffer, copied in one go."""

    first: StagedBox
    last: StagedBox

    @property
    def start(self) -> int:
        return self.first.part.start

    @property
    def stop(self) -> int:
        return self.last.part.start + math.prod(self.last.part.shape)

    def leads_to(self, lot: StagedBox) -> bool:
        """Whether ``lot`` follows directly."""
        end = self.last.state, self.last.part.piece, self.stop, self.last.end
        return end == (lot.state, lot.part.piece, lot.part.start, lot.position)


class StagingBuffer:
    """A host buffer that is refilled for every save."""

    def __init__(
        self,
        parts: list[WrittenBox],
        device: torch.device,
        states: int,
        ahead: bool = True,
        tell: Callable[[str], None] = print,
        others: Mapping[str, list[WrittenBox]] | None = None,
        on_disk: Callable[[int], Tensor] | None = None,
    ) -> None:
        """``states``: how many states each part will have. ``ahead``: allocate before it is needed.

        ``on_disk`` makes the buffer if memory has no room for it.

        ``tell`` is called if the memory is not as it should be. ``others``: states by name that do not have one value
        per element, with parts of their own.
        """
        self.parts, self.tell, self.others = parts, tell, others or {}
        self._on_disk = on_disk
        self.lots: list[StagedBox] = []
        self._states: list[str] = []
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._room: PinnedMemory | None = None
        # Sources of copies, and their destinations.
        self._stretches: list[tuple[CopyRun, Tensor]] = []
        self._others: list[tuple[StagedBox, Tensor]] = []  # elements that are not contiguous
        if self._stream is not None and ahead and on_disk is None:
            sizes = (math.prod(part.size) * part.piece.tensor.element_size() for part in parts)
            self._room = PinnedMemory(sum(sizes) * states)

    @torch.no_grad()
    def fill(self, states: States) -> None:
        """Start copying these states. They must not change before ``hold_update`` has returned."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            values = dict(states)
            self._make_room(states)
            # A GPU idles while its host issues copies, so issue few copies and few views.
            present = _Present(values)
            for stretch, target in self._stretches:
                value = present(stretch.first)
                if value.shape != target.shape:
                    value = value.reshape(-1)[stretch.start : stretch.stop]
                target.copy_(value, non_blocking=True)
            for lot, target in self._others:
                target.copy_(lot.part.of(present(lot)), non_blocking=True)
            if self._stream is not None:
                self._copied = self._stream.record_event()

    def hold_update(self) -> None:
        """Call before the states change. Only the device waits: what is issued next runs after the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def content(self) -> memoryview:
        """The copied bytes; complete when this returns."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.buffer.numpy().data

    def _make_room(self, states: States) -> None:
        """Lay out and allocate the buffer. The same states keep their places; after the first update there are more."""
        wanted = [state for state, _ in states]
        if self._states == wanted:
            return
        self._states = wanted
        kinds = [
            (state, part, found.dtype)
            for state, value in states
            for part in self.others.get(state, self.parts)
            if (found := value(part.piece)) is not None
        ]
        # Widest elements first: then all are aligned without gaps, and every byte of the file belongs to a piece.
        kinds.sort(key=lambda kind: -kind[2].itemsize)
        self.lots, position = [], 0
        for state, part, dtype in kinds:
            self.lots.append(StagedBox(state, part, dtype, position))
            position += self.lots[-1].bytes
        self.buffer = self._take_room(position)
        values = dict(states)
        self._stretches, self._others = [], []
        for stretch in _stretches(lot for lot in self.lots if _in_order(lot.part)):
            target = self._place(stretch.first, stretch.last)
            value = _kept(values, stretch.first)
            # A whole tensor is copied as it is.
            whole = target.numel() == value.numel()
            self._stretches.append((stretch, target.view(value.shape) if whole else target))
        for lot in self.lots:
            if not _in_order(lot.part):
                self._others.append((lot, self._place(lot, lot).view(lot.part.size)))

    def _take_room(self, size: int) -> Tensor:
        if self._on_disk is not None:
            return self._on_disk(size)
        if self._room is None:
            return _pageable(size)
        buffer, trouble = self._room.take(size)
        if trouble:
            self.tell(trouble)
        return buffer

    def _place(self, first: StagedBox, last: StagedBox) -> Tensor:
        return self.buffer[first.position : last.end].view(first.dtype)


class _Present:
    """Values, and copies of those in files: one at a time."""

    def __init__(self, values: Mapping[str, Callable[[Held], Tensor | None]]) -> None:
        self._values = values
        self._last: tuple[str, Held] | None = None
        self._copy = torch.empty(0)

    def __call__(self, lot: StagedBox) -> Tensor:
        piece = lot.part.piece
        if piece.filed is None:
            return _kept(self._values, lot)
        if self._last != (lot.state, piece):
            self._copy = torch.empty(0)  # free it before allocating the next
            self._last, self._copy = (lot.state, piece), piece.filed.read(lot.state)
        return self._copy


def _kept(values: Mapping[str, Callable[[Held], Tensor | None]], lot: StagedBox) -> Tensor:
    found = values[lot.state](lot.part.piece)
    assert found is not None
    return found


def _stretches(lots: Iterable[StagedBox]) -> list[CopyRun]:
    found: list[CopyRun] = []
    for lot in lots:
        if found and found[-1].leads_to(lot):
            found[-1] = CopyRun(found[-1].first, lot)
        else:
            found.append(CopyRun(lot, lot))
    return found


def _in_order(part: WrittenBox) -> bool:
    """Whether its elements are contiguous in the piece: whole rows, not transposed."""
    return not part.view.transposed and part.within == tuple(slice(0, size) for size in part.shape)


class PinnedMemory:
    """Pinned (page-locked) host memory, which a GPU copies into asynchronously.

    Pinning takes half a second per gigabyte, which no step should wait for. It may also fail (a limit on locked memory,
    too little memory): then copies go through pageable memory, and training waits longer.
    """

    def __init__(self, size: int) -> None:
        pool = ThreadPoolExecutor(1, "shoal-pin")
        self._asked: Future[tuple[Tensor, str]] = pool.submit(_pinned, size)
        pool.shutdown(wait=False)

    def take(self, size: int) -> tuple[Tensor, str]:
        """Memory of this size, and a message about it, if any."""
        room, trouble = self._asked.result()
        return (room[:size], trouble) if room.numel() >= size else _pinned(size)


def _pinned(size: int) -> tuple[Tensor, str]:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True), ""
    except RuntimeError as refusal:
        return _pageable(size), (
            f"{size / 1e9:.1f} GB of host memory for checkpoints could not be pinned ({first_line(refusal)}); "
            "pageable memory is used, and training waits longer for its copies"
        )


def _pageable(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)
