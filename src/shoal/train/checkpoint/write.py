"""Writing a checkpoint: pieces, then the manifest, all flushed to disk, then one rename that is the commit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from blake3 import blake3

from shoal.train.checkpoint.directory import UNFINISHED, step_directory
from shoal.train.checkpoint.manifest import NAME, Manifest, Piece
from shoal.train.files import sync_directory


def write_checkpoint(
    checkpoints: Path, manifest: Manifest, tensors: Iterable[tuple[str, str, torch.Tensor]]
) -> Path:
    """Commit (state, tensor name, tensor) triples as the checkpoint that ``manifest``, yet without pieces, describes.

    Whatever fails on the way, the checkpoints that were there stay, and no unfinished one carries a step's name.
    """
    target = step_directory(checkpoints, manifest.step)
    aside = checkpoints / f"{UNFINISHED}{target.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        pieces, shapes = _write_pieces(aside / "pieces-00000.bin", tensors)
        complete = manifest.model_copy(update={"pieces": pieces, "shapes": shapes})
        with (aside / NAME).open("w", encoding="utf-8") as file:
            file.write(complete.to_text())
            file.flush()
            os.fsync(file.fileno())
        sync_directory(aside)
        aside.rename(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_directory(checkpoints)
    return target


def _write_pieces(
    path: Path, tensors: Iterable[tuple[str, str, torch.Tensor]]
) -> tuple[tuple[Piece, ...], dict[str, tuple[int, ...]]]:
    pieces = []
    shapes: dict[str, tuple[int, ...]] = {}
    with path.open("wb") as file:
        for state, name, tensor in tensors:
            shapes[name] = tuple(tensor.shape)
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            pieces.append(
                Piece(
                    tensor=name,
                    state=state,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    offset=(0,) * tensor.ndim,
                    size=tuple(tensor.shape),
                    file=path.name,
                    position=file.tell(),
                    bytes=content.nbytes,
                    hash=blake3(content, max_threads=blake3.AUTO).hexdigest(),
                )
            )
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return tuple(pieces), shapes
