"""Reading a checkpoint: every byte is checked before a tensor is used, and nothing is read that is not needed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from shoal.facts.boxes import meet
from shoal.facts.model import Model
from shoal.facts.views import View, intersect, views
from shoal.models.initial import Slice
from shoal.train.checkpoint.manifest import Damaged, Manifest, Piece, parse_manifest
from shoal.train.checkpoint.place import Directory, Place, Unreachable

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)
}


class Wanted(NamedTuple):
    """A box of one of Hugging Face's tensors, and the tensor of that shape to put it into."""

    state: str
    tensor: str
    offset: tuple[int, ...]
    into: Tensor


@dataclass
class _Reading:
    """A piece, and who wants some of it."""

    piece: Piece
    wanted: list[Wanted] = field(default_factory=list)


class Checkpoint:
    """A committed checkpoint. Its manifest is verified at once, a piece when it is read."""

    def __init__(self, place: Place | Path, step: int | None = None, threads: int | None = None) -> None:
        """Of a place and a step; or of the directory of one checkpoint. ``threads`` read and hash."""
        if isinstance(place, Path):
            step = int(place.name.rpartition("-")[2])
            place = Directory(place.parent)
        assert step is not None
        self.place: Place = place
        self.step = step
        self.threads = threads or os.cpu_count() or 1
        name = place.name(step)
        self.manifest: Manifest = parse_manifest(place.read_manifest(step), f"{name}/manifest.json")
        if self.manifest.step != step:
            raise Damaged(f"{name} is the checkpoint of step {self.manifest.step}")
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        for piece in self.manifest.pieces:
            self._pieces.setdefault((piece.state, piece.tensor), []).append(piece)
        for file, size in self.manifest.file_sizes().items():
            # Before anything is allocated for what it is said to hold.
            found = place.size(step, file)
            if found != size:
                raise Damaged(f"{name}/{file} has {found} bytes, and {size} were written")

    @property
    def states(self) -> set[str]:
        return {state for state, _ in self._pieces}

    def tensor(self, state: str, name: str) -> Tensor:
        """One whole tensor."""
        shape = self.manifest.shapes.get(name)
        if shape is None or (state, name) not in self._pieces:
            raise Damaged(f"{self.place.name(self.step)} holds no {state} of {name}")
        whole = torch.empty(shape, dtype=DTYPES[self._pieces[state, name][0].dtype])
        self.read([Wanted(state, name, (0,) * len(shape), whole)])
        return whole

    def fill(self, model: Model, slices: Iterable[tuple[str, str, Slice]]) -> None:
        """Fill parts of our parameters, or of what an optimizer keeps of them: (state, our name, part)."""
        of_parameter: dict[str, list[View]] = {}
        for view in views(model):
            of_parameter.setdefault(view.canonical, []).append(view)
        wanted = []
        for state, name, part in slices:
            for view in of_parameter[name]:
                overlap = intersect(view, part.offset, tuple(part.local.shape))
                if overlap is not None:
                    box = tuple(
                        slice(start, start + size)
                        for start, size in zip(overlap.slice_offset, overlap.slice_shape, strict=True)
                    )
                    into = part.local[box]
                    wanted.append(
                        Wanted(state, view.tensor, overlap.tensor_offset, into.T if view.transposed else into)
                    )
        self.read(wanted)

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Read every piece that somebody wants some of, once, and check it; several at a time."""
        readings: dict[Piece, _Reading] = {}
        for one in wanted:
            pieces = self._pieces.get((one.state, one.tensor))
            if not pieces:
                raise Damaged(f"{self.place.name(self.step)} holds no {one.state} of {one.tensor}")
            for piece in pieces:
                if meet(piece.offset, piece.size, one.offset, tuple(one.into.shape)):
                    readings.setdefault(piece, _Reading(piece)).wanted.append(one)
        with ThreadPoolExecutor(self.threads, "shoal-read") as pool:
            for _ in pool.map(self._deliver, readings.values()):
                pass

    def verify(self) -> None:
        """Read and check everything."""
        with ThreadPoolExecutor(self.threads, "shoal-verify") as pool:
            for _ in pool.map(self._read, self.manifest.pieces):
                pass

    @torch.no_grad()
    def _deliver(self, reading: _Reading) -> None:
        piece = reading.piece
        content = self._read(piece)
        for one in reading.wanted:
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

    def _read(self, piece: Piece) -> Tensor:
        content = torch.empty(piece.bytes, dtype=torch.uint8)
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
