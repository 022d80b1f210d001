"""Import a Hugging Face model directory as a checkpoint, tensor by tensor: no process ever holds the model.

Names and shapes are the same on both sides. A checkpoint adds a hash of every byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3

from shoal.facts.input.untrusted_files import read_json
from shoal.facts.model import Model, hub, presets
from shoal.facts.model.parameters import parameters
from shoal.facts.problem import BadInput, first_line
from shoal.models.huggingface import WeightFiles
from shoal.train.checkpoint.manifest import Manifest, StoredPiece, identity_hash
from shoal.train.checkpoint.peer_memory import file_of
from shoal.train.checkpoint.storage import DirectoryStorage
from shoal.train.huggingface.export import check_free
from shoal.train.run_directory import WEIGHTS

# Elements of a piece, the unit of reading, hashing and writing.
AT_ONCE = 1 << 23
# Nothing was trained yet.
STEP = 0
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class ImportedModel:
    """What was written."""

    path: Path  # of the checkpoint
    model: str
    bytes: int
    tensors: int


def import_weights(origin: str, into: Path) -> ImportedModel:
    """Import the model; all or nothing. ``origin``: a model directory, or a name on the Hub."""
    check_free(into)
    path = hub.fetch(origin, hub.WEIGHTS) if hub.is_hub_name(origin) else Path(origin).expanduser().absolute()
    if not (path / "config.json").is_file():
        raise BadInput(
            f"{origin} is no Hugging Face model directory: it has no config.json",
            "a directory with config.json and *.safetensors, or a Hub name (org/name)",
        )
    model = presets.at(str(path))
    files = WeightFiles(path, model)
    pieces: list[StoredPiece] = []
    identity = {WEIGHTS: str(path), **_tokenizer(path)}
    place = DirectoryStorage(into / "checkpoints")
    try:
        place.write(STEP, "import", file_of(0), _contents(files, model, pieces))
        manifest = Manifest(
            step=STEP,
            samples=0,
            model=model.model_dump(mode="json"),
            identity=identity,
            recipe=identity_hash(identity),
            scalars={"updates": 0.0, "loss_scale": 1.0, "quiet_steps": 0.0},
            shapes={one.name: one.shape for one in parameters(model)},
            pieces=tuple(pieces),
        )
        place.commit(STEP, "import", manifest.to_text())
    except OSError as error:
        place.abandon(STEP, "import")
        raise BadInput(
            f"cannot write to {into}: {first_line(error)}", "make room, or another directory"
        ) from None
    size = sum(piece.bytes for piece in pieces)
    return ImportedModel(place.at(STEP), model.name, size, len(manifest.shapes))


def _contents(files: WeightFiles, model: Model, pieces: list[StoredPiece]) -> Iterator[memoryview]:
    """The bytes of all tensors, a few rows at a time; a description of each part is appended to ``pieces``."""
    position = 0
    for one in parameters(model):
        rows = max(AT_ONCE // math.prod(one.shape[1:]), 1)
        for start in range(0, one.shape[0], rows):
            offset = (start, *(0 for _ in one.shape[1:]))
            size = (min(rows, one.shape[0] - start), *one.shape[1:])
            part = files.read(one.name, offset, size).contiguous()
            content = part.reshape(-1).view(torch.uint8).numpy().data
            pieces.append(
                StoredPiece(
                    tensor=one.name,
                    state="weight",
                    dtype=str(part.dtype).removeprefix("torch."),
                    offset=offset,
                    size=size,
                    file=file_of(0),
                    position=position,
                    bytes=content.nbytes,
                    hash=blake3(content, max_threads=blake3.AUTO).hexdigest(),
                )
            )
            position += content.nbytes
            yield content
    files.close()


def _tokenizer(path: Path) -> dict[str, str]:
    """What a later export of the checkpoint needs: the tokenizer, and the token that ends a text."""
    if not (path / TOKENIZER).is_file():
        return {}
    found = {"data.tokenizer": str(path)}
    try:
        end = read_json(path / "tokenizer_config.json").get("eos_token")
    except (OSError, ValueError, AttributeError):
        return found
    end = end.get("content") if isinstance(end, dict) else end
    return found | ({"data.end_token": end} if isinstance(end, str) else {})
