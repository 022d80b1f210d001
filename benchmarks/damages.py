"""Damages to the files of a checkpoint, drawn from a seed. Each one changes something that was written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from shoal.train.checkpoint.manifest import NAME, StoredPiece, parse_manifest

# What may happen to a checkpoint, and how often of a hundred times it does here.
KINDS = {
    "flip in a tensor": 30,
    "flip in the manifest": 15,
    "truncated": 15,
    "files swapped": 8,
    "pieces swapped": 15,
    "missing": 5,
    "of another step": 12,
}


@dataclass(frozen=True)
class Damage:
    """Files as they are now: their content, or None for one that is gone."""

    kind: str
    what: str
    files: dict[str, bytes | None]


@dataclass(frozen=True)
class Flip:
    """A bit of a tensor's bytes."""

    file: str
    position: int
    bit: int


class Damages:
    """Damages to a checkpoint in ``path``; ``other`` is that of another step of the same run."""

    def __init__(self, path: Path, other: Path, seed: int) -> None:
        self.numbers = Random(seed)
        self.content, self.others = _read(path), _read(other)
        self.pieces = parse_manifest(self.content[NAME], str(path)).pieces
        self.data = sorted(file for file in self.content if file != NAME)

    def draw(self, count: int) -> Iterator[Damage]:
        for kind in self.numbers.choices(list(KINDS), list(KINDS.values()), k=count):
            yield self._changing(kind)

    def flip(self) -> Flip:
        file = self.numbers.choice(self.data)
        return Flip(file, self.numbers.randrange(len(self.content[file])), self.numbers.randrange(8))

    def flipped(self, flip: Flip) -> Damage:
        content = bytearray(self.content[flip.file])
        content[flip.position] ^= 1 << flip.bit
        return Damage(
            "flip in a tensor",
            f"{flip.file} byte {flip.position} bit {flip.bit}",
            {flip.file: bytes(content)},
        )

    def _changing(self, kind: str) -> Damage:
        """One that does change something: two files, or two pieces, may be alike."""
        while True:
            damage = self._draw(kind)
            if any(self.content.get(file) != content for file, content in damage.files.items()):
                return damage

    def _draw(self, kind: str) -> Damage:
        if kind == "flip in a tensor":
            return self.flipped(self.flip())
        if kind == "flip in the manifest":
            content = bytearray(self.content[NAME])
            position, bit = self.numbers.randrange(len(content)), self.numbers.randrange(8)
            content[position] ^= 1 << bit
            return Damage(kind, f"byte {position} bit {bit}", {NAME: bytes(content)})
        if kind == "pieces swapped":
            return self._swapped_pieces(kind)
        file = self.numbers.choice(sorted(self.content))
        if kind == "truncated":
            length = self.numbers.randrange(len(self.content[file]))
            return Damage(kind, f"{file} to {length} bytes", {file: self.content[file][:length]})
        if kind == "missing":
            return Damage(kind, file, {file: None})
        if kind == "of another step":
            return Damage(kind, file, {file: self.others[file]})
        one, two = self.numbers.sample(self.data, 2)
        return Damage(kind, f"{one} and {two}", {one: self.content[two], two: self.content[one]})

    def _swapped_pieces(self, kind: str) -> Damage:
        one = self.numbers.choice(self.pieces)
        two = self.numbers.choice([piece for piece in self.pieces if piece.bytes == one.bytes])
        files = {piece.file: bytearray(self.content[piece.file]) for piece in (one, two)}
        for piece, source in ((one, two), (two, one)):
            files[piece.file][piece.position : piece.position + piece.bytes] = self._bytes(source)
        return Damage(kind, f"{one} and {two}", {file: bytes(content) for file, content in files.items()})

    def _bytes(self, piece: StoredPiece) -> bytes:
        return self.content[piece.file][piece.position : piece.position + piece.bytes]


@contextmanager
def done(damage: Damage, path: Path, content: Mapping[str, bytes]) -> Iterator[None]:
    """The damage, done to the checkpoint in ``path``, and undone in the end."""
    try:
        for file, changed in damage.files.items():
            if changed is None:
                (path / file).unlink()
            else:
                (path / file).write_bytes(changed)
        yield
    finally:
        for file in damage.files:
            (path / file).write_bytes(content[file])


def element(piece: StoredPiece, position: int, shape: tuple[int, ...], item: int) -> int:
    """The byte of the whole tensor that a byte of a piece is."""
    number, byte = divmod(position, item)
    index = []
    for size in reversed(piece.size):
        number, place = divmod(number, size)
        index.append(place)
    whole = 0
    for place, start, size in zip(reversed(index), piece.offset, shape, strict=True):
        whole = whole * size + start + place
    return whole * item + byte


def _read(path: Path) -> dict[str, bytes]:
    return {entry.name: (path / entry.name).read_bytes() for entry in os.scandir(path)}
