"""Read a checkpoint: verify every byte before use, and read only what is needed."""

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
from shoal.facts.model.tensor_split import box_slices, meet
from shoal.facts.optimizers import OF_MATRICES
from shoal.models.initial import Slice
from shoal.train.checkpoint.manifest import ITEM_BYTES, Damaged, Manifest, StoredPiece
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
    """A box of one of Hugging Face's tensors, and the tensor of that shape to put it into."""

    state: str
    tensor: str
    offset: tuple[int, ...]
    into: Tensor


class _Pieces:
    """The pieces of one tensor from row to row: what some rows need is found without a look at all the others."""

    def __init__(self, pieces: list[StoredPiece]) -> None:
        self.dtype = max((piece.dtype for piece in pieces), key=lambda dtype: DTYPES[dtype].itemsize)
        self._pieces = sorted(pieces, key=lambda piece: piece.offset)
        self._starts = [_rows(piece.offset, piece.size)[0] for piece in self._pieces]
        # How far any piece up to here reaches, which never falls.
        self._reach = list(accumulate((_rows(piece.offset, piece.size)[1] for piece in self._pieces), max))

    def near(self, wanted: Wanted) -> list[StoredPiece]:
        """All that have an element of the wanted ones, and few others."""
        start, stop = _rows(wanted.offset, tuple(wanted.into.shape))
        return self._pieces[bisect_right(self._reach, start) : bisect_left(self._starts, stop)]


def _rows(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, int]:
    return (offset[0], offset[0] + size[0]) if offset else (0, 1)


class Checkpoint:
    """A committed checkpoint. Its manifest is verified at once, a piece when it is read."""

    def __init__(
        self, place: CheckpointStorage | Path, step: int | None = None, threads: int | None = None
    ) -> None:
        """Of a place and a step; or of the directory of one checkpoint. ``threads`` read and hash."""
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
        by_tensor: dict[tuple[str, str], list[StoredPiece]] = {}
        for piece in self.manifest.pieces:
            by_tensor.setdefault((piece.state, piece.tensor), []).append(piece)
        self._pieces = {key: _Pieces(pieces) for key, pieces in by_tensor.items()}
        for file, size in self.manifest.file_sizes().items():
            # Before anything is allocated for what it is said to hold.
            check_file(place, step, file, size)

    @property
    def states(self) -> set[str]:
        return {state for state, _ in self._pieces}

    def dtype(self, state: str, name: str | None = None) -> torch.dtype:
        """Of one tensor's, or of the first one's."""
        name = next(iter(self.manifest.shapes)) if name is None else name
        return DTYPES[self._pieces[state, name].dtype]

    def tensor(self, state: str, name: str) -> Tensor:
        """One whole tensor."""
        shape = self.manifest.shapes.get(name)
        if shape is None or (state, name) not in self._pieces:
            raise Damaged(f"{self.place.name(self.step)} holds no {state} of {name}")
        whole = torch.empty(shape, dtype=DTYPES[self._pieces[state, name].dtype])
        self.read([Wanted(state, name, (0,) * len(shape), whole)])
        return whole

    def fill(self, model: Model, slices: Iterable[tuple[str, str, Slice]]) -> None:
        """Fill parts of our parameters, or of what an optimizer keeps of them: (state, our name, part)."""
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
        """The same, by how parameters are found in the checkpoint's tensors."""
        wanted = []
        for state, name, part in slices:
            if state in OF_MATRICES:
                # Of our own matrices: one of Hugging Face's may be several of them, or one transposed.
                wanted.append(Wanted(state, name, part.offset, part.local))
                continue
            for view in of_parameter[name]:
                overlap = intersect(view, part.offset, tuple(part.local.shape))
                if overlap is not None:
                    into = part.local[box_slices(overlap.slice_offset, overlap.slice_shape)]
                    into = into[0] if view.stacked else into.T if view.transposed else into
                    wanted.append(Wanted(state, view.tensor, overlap.tensor_offset, into))
        self.read(wanted)

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Read and verify every needed piece once, several at a time."""
        readings: dict[StoredPiece, list[Wanted]] = {}
        for one in wanted:
            pieces = self._pieces.get((one.state, one.tensor))
            if pieces is None:
                raise Damaged(f"{self.place.name(self.step)} holds no {one.state} of {one.tensor}")
            _check_within(one, self.manifest.shape_of(one.state, one.tensor) or ())
            for piece in pieces.near(one):
                if meet(piece.offset, piece.size, one.offset, tuple(one.into.shape)):
                    readings.setdefault(piece, []).append(one)
        in_order = sorted(readings, key=_place_of)
        with self._pool() as pool:
            for _ in pool.map(self._deliver, in_order, map(readings.__getitem__, in_order)):
                pass

    def damages(self) -> list[Damaged]:
        """Read and check everything: all that is not as it was written."""

        def damage(piece: StoredPiece) -> Damaged | None:
            try:
                self._read(piece)
            except Damaged as error:
                return error
            return None

        with self._pool() as pool:
            found = pool.map(damage, sorted(self.manifest.pieces, key=_place_of))
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
        """Sound, and there until this thread reads the next one."""
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
        """The same memory again: to be given new memory for every piece takes longer than to read it."""
        buffer: Tensor | None = getattr(self._buffers, "buffer", None)
        if buffer is None or buffer.nbytes < size:
            self._buffers.buffer = buffer = torch.empty(size, dtype=torch.uint8)
        return buffer[:size]


def _check_within(wanted: Wanted, shape: tuple[int, ...]) -> None:
    """What lies outside the tensor would silently be left as it was."""
    ends = [start + size for start, size in zip(wanted.offset, wanted.into.shape, strict=True)]
    if len(ends) != len(shape) or any(end > whole for end, whole in zip(ends, shape, strict=True)):
        raise Damaged(f"{wanted.tensor} has the shape {shape}, and no part that ends at {tuple(ends)}")


def _place_of(piece: StoredPiece) -> tuple[str, int]:
    return piece.file, piece.position
