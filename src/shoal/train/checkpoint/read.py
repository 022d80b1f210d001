"""Read a checkpoint: verify every byte before use, and read only what is needed.

If the manifest is in parts, a rank opens only those that have a piece it needs.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from shoal.facts.cluster.this_machine import usable_threads
from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import View, intersect, views_by_parameter
from shoal.facts.model.parameters import parameters
from shoal.facts.model.tensor_split import box_slices, cover_alike, meet
from shoal.facts.optimizers import OF_MATRICES
from shoal.models.initial import Slice
from shoal.train.checkpoint.manifest import ITEM_BYTES, Damaged, Manifest, StoredPiece
from shoal.train.checkpoint.parts import Box, completed, parts_near, read_part
from shoal.train.checkpoint.storage import (
    CheckpointStorage,
    DirectoryStorage,
    Unreachable,
    check_file,
    manifest_of,
    step_name,
    step_of,
)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


class Wanted(NamedTuple):
    """A box of one of Hugging Face's tensors, and the tensor of that shape to read it into."""

    state: str
    tensor: str
    offset: tuple[int, ...]
    into: Tensor


class _Pieces:
    """The pieces of one tensor sorted by row, so that lookups need not scan all of them."""

    def __init__(self, pieces: list[StoredPiece]) -> None:
        self.dtype = max((piece.dtype for piece in pieces), key=lambda dtype: DTYPES[dtype].itemsize)
        self._pieces = sorted(pieces, key=lambda piece: piece.offset)
        self._starts = [_rows(piece.offset, piece.size)[0] for piece in self._pieces]
        # The furthest row that any piece up to here reaches; non-decreasing.
        self._reach = list(accumulate((_rows(piece.offset, piece.size)[1] for piece in self._pieces), max))

    def near(self, wanted: Wanted) -> list[StoredPiece]:
        """All pieces that overlap the wanted box, and few others."""
        start, stop = _rows(wanted.offset, tuple(wanted.into.shape))
        return self._pieces[bisect_right(self._reach, start) : bisect_left(self._starts, stop)]


def _rows(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, int]:
    return (offset[0], offset[0] + size[0]) if offset else (0, 1)


class Checkpoint:
    """A committed checkpoint. Its manifest is verified at once, each piece when it is read."""

    def __init__(
        self,
        place: CheckpointStorage | Path,
        step: int | None = None,
        threads: int | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Opens a step of a place, or the directory of one checkpoint. ``threads`` read and hash.

        ``share``: (index, number of readers). Together the readers check that every file has its recorded length; each
        also checks the files it reads from.
        """
        if isinstance(place, Path):
            step = step_of(place.name)
            if step is None:
                raise Damaged(f"{place} is not named as a checkpoint is: {step_name(0)}")
            place = DirectoryStorage(place.parent)
        assert step is not None
        self.place: CheckpointStorage = place
        self.step = step
        self.threads = threads or usable_threads()
        name = place.name(step)
        self.manifest: Manifest = manifest_of(place, step)
        if self.manifest.step != step:
            raise Damaged(f"{name} is the checkpoint of step {self.manifest.step}")
        self._buffers = threading.local()
        self._lists: dict[int, list[StoredPiece]] = {}  # of the opened parts
        self._by_tensor: dict[tuple[str, str], list[StoredPiece]] = {}
        self._sorted: dict[tuple[str, str], _Pieces] = {}
        self._add(self.manifest.pieces)
        self._sizes, self._checked = self.manifest.file_sizes(), set[str]()
        mine, readers = share
        self._check_files([*self._sizes][mine::readers])

    @property
    def states(self) -> set[str]:
        return {state for state, _ in self._by_tensor} | set(self.manifest.states)

    @property
    def parts_opened(self) -> int:
        return len(self._lists)

    def all_pieces(self) -> tuple[StoredPiece, ...]:
        """Every piece, including those of parts, which are all opened for that."""
        return completed(self.place, self.step, self.manifest).pieces

    def _add(self, pieces: Iterable[StoredPiece]) -> None:
        for piece in pieces:
            key = piece.state, piece.tensor
            self._by_tensor.setdefault(key, []).append(piece)
            self._sorted.pop(key, None)

    def _pieces(self, state: str, tensor: str, box: Box | None = None) -> _Pieces | None:
        """The pieces of a tensor; given a box, at least those that overlap it. None if there are none."""
        whole = self.manifest.shape_of(state, tensor) or ()
        self._open(parts_near(self.manifest, state, tensor, box or ((0,) * len(whole), whole)))
        key = state, tensor
        if key not in self._sorted and key in self._by_tensor:
            self._sorted[key] = _Pieces(self._by_tensor[key])
        return self._sorted.get(key)

    def _open(self, parts: set[int]) -> None:
        new = sorted(parts - self._lists.keys())
        if not new:
            return
        with self._pool() as pool:
            named = (self.manifest.parts[number] for number in new)
            lists = pool.map(lambda part: read_part(self.place, self.step, self.manifest, part), named)
            for number, pieces in zip(new, lists, strict=True):
                self._lists[number] = pieces
                self._add(pieces)

    def _check_files(self, files: Iterable[str]) -> None:
        """Check files before allocating anything for what they should contain."""
        for file in files:
            if file not in self._checked:
                check_file(self.place, self.step, file, self._sizes[file])
                self._checked.add(file)

    def dtype(self, state: str, name: str | None = None) -> torch.dtype:
        """The dtype of a state of one tensor, or of the first tensor."""
        name = next(iter(self.manifest.shapes)) if name is None else name
        pieces = self._pieces(state, name)
        if pieces is None:
            raise Damaged(f"{self.place.name(self.step)} holds no {state} of {name}")
        return DTYPES[pieces.dtype]

    def tensor(self, state: str, name: str) -> Tensor:
        """One whole tensor."""
        shape = self.manifest.shapes.get(name)
        if shape is None:
            raise Damaged(f"{self.place.name(self.step)} holds no {state} of {name}")
        whole = torch.empty(shape, dtype=self.dtype(state, name))
        self.read([Wanted(state, name, (0,) * len(shape), whole)])
        return whole

    def fill(self, model: Model, slices: Iterable[tuple[str, str, Slice]]) -> None:
        """Fill parts of our parameters or their optimizer states: (state, our name, part)."""
        for parameter in parameters(model):
            found = self.manifest.shapes.get(parameter.name)
            if found != parameter.shape:
                raise Damaged(
                    f"{self.place.name(self.step)}: {parameter.name} has the shape {found}, "
                    f"in this model it is {parameter.shape}"
                )
        self.fill_by_views(views_by_parameter(model), slices)

    def fill_by_views(
        self, of_parameter: Mapping[str, list[View]], slices: Iterable[tuple[str, str, Slice]]
    ) -> None:
        """The same, with explicit views of parameters in the checkpoint's tensors."""
        wanted = []
        for state, name, part in slices:
            if state in OF_MATRICES:
                # Views map our matrices to Hugging Face's: one of theirs may be several of ours, or a transposed one.
                wanted.append(Wanted(state, name, part.offset, part.local))
                continue
            for view in of_parameter[name]:
                overlap = intersect(view, part.offset, tuple(part.local.shape))
                if overlap is not None:
                    into = part.local[box_slices(overlap.slice_offset, overlap.slice_shape)]
                    into = into[0] if view.stacked else into.T if view.transposed else into
                    wanted.append(Wanted(state, view.tensor, overlap.tensor_offset, into))
        self.read(wanted)

    def needed(self, wanted: Iterable[Wanted]) -> dict[StoredPiece, list[Wanted]]:
        """The pieces that overlap what is wanted, each with what it is wanted for; raises if anything is missing."""
        readings: dict[StoredPiece, list[Wanted]] = {}
        wanted = list(wanted)
        self.open_for(wanted)
        for one in wanted:
            box = one.offset, tuple(one.into.shape)
            pieces = self._pieces(one.state, one.tensor, box)
            if pieces is None:
                raise Damaged(f"{self.place.name(self.step)} holds no {one.state} of {one.tensor}")
            _check_within(one, self.manifest.shape_of(one.state, one.tensor) or ())
            met = []
            for piece in pieces.near(one):
                if common := meet(piece.offset, piece.size, *box):
                    readings.setdefault(piece, []).append(one)
                    met.append(common)
            # A manifest that lists all pieces was checked for full coverage when it was read.
            if self.manifest.parts and not cover_alike([box] if one.into.numel() else [], met):
                raise Damaged(
                    f"{self.place.name(self.step)}: the pieces of {one.state} {one.tensor} leave a gap"
                )
        self._check_files({piece.file for piece in readings})
        return readings

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Read and verify every needed piece once, several at a time."""
        readings = self.needed(wanted)
        in_order = sorted(readings, key=_place_of)
        with self._pool() as pool:
            for _ in pool.map(self._deliver, in_order, map(readings.__getitem__, in_order)):
                pass

    def open_for(self, wanted: Iterable[Wanted]) -> None:
        """Open all needed parts concurrently: they are many small files, each with latency."""
        boxes = {(one.state, one.tensor, one.offset, tuple(one.into.shape)) for one in wanted}
        near = (parts_near(self.manifest, state, name, (offset, size)) for state, name, offset, size in boxes)
        self._open(set().union(*near))

    def damages(self) -> list[Damaged]:
        """Read and check everything; returns all damage."""

        def damage(piece: StoredPiece) -> Damaged | None:
            try:
                self._read(piece)
            except Damaged as error:
                return error
            return None

        with self._pool() as pool:
            found = pool.map(damage, sorted(self.all_pieces(), key=_place_of))
            return [error for error in found if error is not None]

    def verify(self) -> None:
        """Read and check everything."""
        for error in self.damages():
            raise error

    def _pool(self) -> ThreadPoolExecutor:
        # One more than hash at a time: it waits for the disk meanwhile.
        return ThreadPoolExecutor(self.threads + 1, "shoal-read")

    @torch.no_grad()
    def _deliver(self, piece: StoredPiece, wanted: list[Wanted]) -> None:
        content = self._read(piece)
        for one in wanted:
            common = meet(piece.offset, piece.size, one.offset, tuple(one.into.shape))
            assert common is not None
            theirs, ours = (
                tuple(
                    slice(start - origin, start - origin + size)
                    for start, origin, size in zip(common[0], corner, common[1], strict=True)
                )
                for corner in (piece.offset, one.offset)
            )
            one.into[ours].copy_(content[theirs])

    def _read(self, piece: StoredPiece) -> Tensor:
        """A verified tensor, valid until this thread reads the next piece."""
        content = self._buffer(piece.bytes)
        memory = content.numpy().data
        try:
            self.place.read(self.step, piece.file, piece.position, memory)
        except Unreachable:
            raise
        except OSError as error:
            raise Damaged(f"{self.place.name(self.step)}/{piece}: {error}") from None
        if blake3(memory).hexdigest() != piece.hash:
            raise Damaged(
                f"{self.place.name(self.step)}/{piece}: its bytes are not those that were written (BLAKE3 differs)"
            )
        return content.view(DTYPES[piece.dtype]).view(piece.size)

    def _buffer(self, size: int) -> Tensor:
        """Reuse one buffer: allocating new memory for every piece takes longer than reading it."""
        buffer: Tensor | None = getattr(self._buffers, "buffer", None)
        if buffer is None or buffer.nbytes < size:
            self._buffers.buffer = buffer = torch.empty(size, dtype=torch.uint8)
        return buffer[:size]


def _check_within(wanted: Wanted, shape: tuple[int, ...]) -> None:
    """Elements outside the tensor would silently stay unset."""
    ends = [start + size for start, size in zip(wanted.offset, wanted.into.shape, strict=True)]
    if len(ends) != len(shape) or any(end > whole for end, whole in zip(ends, shape, strict=True)):
        raise Damaged(f"{wanted.tensor} has the shape {shape}, and no part that ends at {tuple(ends)}")


def _place_of(piece: StoredPiece) -> tuple[str, int]:
    return piece.file, piece.position
