"""Reading a checkpoint: every byte is checked before a tensor is used."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch
from blake3 import blake3

from shoal.train.checkpoint.manifest import Damaged, Manifest, Piece, read_manifest

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)
}


class Checkpoint:
    """A committed checkpoint whose tensors are read one at a time, by state and name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        for piece in self.manifest.pieces:
            self._pieces.setdefault((piece.state, piece.tensor), []).append(piece)

    @property
    def states(self) -> set[str]:
        return {state for state, _ in self._pieces}

    def tensor(self, state: str, name: str) -> torch.Tensor:
        """One whole tensor, put together from its verified pieces."""
        pieces = self._pieces.get((state, name))
        if not pieces:
            raise Damaged(f"{self.path} holds no {state} of {name}")
        shape = self.manifest.shapes.get(name)
        if shape is None or len({piece.dtype for piece in pieces}) != 1:
            raise Damaged(f"{self.path}: the pieces of {state} {name} do not belong together")
        if len(pieces) == 1 and pieces[0].size == shape:
            return self._read(pieces[0])
        whole = torch.empty(shape, dtype=DTYPES[pieces[0].dtype])
        for piece in pieces:
            box = tuple(
                slice(start, start + size) for start, size in zip(piece.offset, piece.size, strict=True)
            )
            whole[box] = self._read(piece)
        # As many elements as the tensor has, and none twice: then none is missing either.
        overlap = any(_meet(one, other) for one, other in itertools.combinations(pieces, 2))
        if overlap or sum(math.prod(piece.size) for piece in pieces) != whole.numel():
            raise Damaged(f"{self.path}: the pieces of {state} {name} do not make up the tensor")
        return whole

    def verify(self) -> None:
        """Read and check everything."""
        for piece in self.manifest.pieces:
            self._read(piece)

    def _read(self, piece: Piece) -> torch.Tensor:
        what = f"{self.path / piece.file}: {piece.state} of {piece.tensor}"
        dtype = DTYPES.get(piece.dtype)
        if dtype is None or piece.bytes != math.prod(piece.size) * dtype.itemsize:
            raise Damaged(f"{what}: {piece.bytes} bytes of {piece.dtype} cannot be a box of {piece.size}")
        content = bytearray(piece.bytes)
        try:
            with (self.path / piece.file).open("rb") as file:
                file.seek(piece.position)
                if file.readinto(content) != piece.bytes:
                    raise Damaged(f"{what}: the file ends before the piece does")
        except OSError as error:
            raise Damaged(f"{what}: {error}") from None
        if blake3(content, max_threads=blake3.AUTO).hexdigest() != piece.hash:
            raise Damaged(f"{what}: its bytes are not those that were written (BLAKE3 differs)")
        return torch.frombuffer(content, dtype=dtype).reshape(piece.size)


def _meet(one: Piece, other: Piece) -> bool:
    """Whether two boxes of a tensor share an element."""
    return all(
        max(first, second) < min(first + width, second + breadth)
        for first, width, second, breadth in zip(one.offset, one.size, other.offset, other.size, strict=True)
    )
