"""The manifest: what a checkpoint holds, piece by piece, every byte hashed, the manifest itself too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

FORMAT = 1
NAME = "manifest.json"


class Damaged(Exception):
    """A checkpoint that does not hold what it says. It is never loaded."""


class Piece(BaseModel):
    """A box of one tensor, and where its bytes lie. Tensor names and shapes are Hugging Face's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: str
    state: str  # "weight", or the optimizer's name for it: "exp_avg", …
    dtype: str
    offset: tuple[int, ...]  # of the box, in the tensor
    size: tuple[int, ...]  # of the box
    file: str
    position: int  # of its bytes, in the file
    bytes: int
    hash: str


class Manifest(BaseModel):
    """A checkpoint: the state after ``step``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    step: int
    samples: int  # used so far: with the recipe's seed, the position in the data
    model: dict[str, Any]
    identity: dict[str, Any]  # what a resume must have in common: recipe and data
    scalars: dict[str, float]  # updates made, loss scale
    shapes: dict[str, tuple[int, ...]]  # of every whole tensor
    pieces: tuple[Piece, ...]

    def to_text(self) -> str:
        content = self.model_dump(mode="json")
        return json.dumps({**content, "hash": _hash(content)}, indent=1) + "\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and verify a checkpoint's manifest; the pieces are verified as they are read."""
    try:
        content = json.loads((checkpoint / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Damaged(f"{checkpoint} has no {NAME}") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{checkpoint / NAME} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.pop("hash", None) != _hash(content):
        raise Damaged(f"{checkpoint / NAME} was changed after it was written: its hash does not match")
    if content.get("format") != FORMAT:
        raise Damaged(
            f"{checkpoint} has format {content.get('format')}; this version of Shoal reads {FORMAT}"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise Damaged(f"{checkpoint / NAME} is not a manifest: {error.errors()[0]['msg']}") from None
    for piece in manifest.pieces:
        if Path(piece.file).name != piece.file:
            raise Damaged(f"{checkpoint / NAME} names a file outside the checkpoint: {piece.file}")
    return manifest


def _hash(content: dict[str, Any]) -> str:
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
