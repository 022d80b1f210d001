"""Export a checkpoint to a Hugging Face model directory, tensor by tensor: no process ever holds the model.

A checkpoint already has Hugging Face's names and shapes, whichever layout wrote it. What remains is to read each tensor
in parts, verify every byte, convert it, and write it out.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import views_by_tensor
from shoal.facts.model.parameters import CORRECTION, by_name, parameters
from shoal.facts.model.tensor_split import box_slices
from shoal.facts.optimizers import AVERAGE
from shoal.facts.problem import BadInput
from shoal.models.initial import Fill, Slice
from shoal.train.checkpoint.listing import ListedCheckpoint
from shoal.train.checkpoint.manifest import MODULE, check_agrees
from shoal.train.checkpoint.read import Checkpoint, Wanted
from shoal.train.files import sync_directory
from shoal.train.first_weights import check_average, merged_weights
from shoal.train.huggingface.peft_files import write_peft
from shoal.train.huggingface.side_files import Origin, write_side_files
from shoal.train.huggingface.weights_file import (
    FILE_BYTES,
    INDEX,
    TensorEntry,
    cut_into_files,
    index_of,
    write_weights_file,
)

# Names of dtypes on the command line.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Their names in a safetensors header, including those of buffers that count or mask.
HEADERS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Elements in memory at a time; a checkpoint's pieces have up to an eighth of that.
AT_ONCE = 1 << 26
# Yields a tensor a few rows at a time.
TensorSource = Callable[[TensorEntry], Iterator[Tensor]]


@dataclass(frozen=True)
class ExportedModel:
    """What was written."""

    path: Path
    step: int
    bytes: int
    tensors: int
    files: int
    dtype: str


def export(
    found: ListedCheckpoint,
    into: Path,
    origin: Origin,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
    average: bool = False,
) -> ExportedModel:
    """Export the model; all or nothing.

    ``dtype``: one of ``DTYPES``; None: as in the checkpoint. No file exceeds ``file_bytes``, except one that holds a
    single tensor. ``average``: export the averaged weights that ``recipe.ema`` keeps.
    """
    checkpoint, state = _opened(found, into, average)
    model = checkpoint.manifest.parsed_model
    source: TensorSource = partial(_parts, checkpoint, state)
    if model.adapters is not None:
        source, model = partial(_merged_parts, model.base, merged_weights(checkpoint, state)), model.base
    held = checkpoint.dtype("weight")
    target = DTYPES[dtype] if dtype is not None else held
    named = str(target).removeprefix("torch.")
    entries = [
        TensorEntry(one.name, HEADERS[_dtype_of(one.name, target)], one.shape) for one in parameters(model)
    ]
    files = cut_into_files(entries, file_bytes)
    with written_aside(into) as aside:
        write_side_files(aside, model, named, origin)
        if len(files) > 1:
            (aside / INDEX).write_text(index_of(files), encoding="utf-8")
        for name, tensors in files.items():
            write_weights_file(aside / name, tensors, _contents(source, tensors, target))
    return ExportedModel(into, found.step, sum(one.bytes for one in entries), len(entries), len(files), named)


def _opened(found: ListedCheckpoint, into: Path, average: bool) -> tuple[Checkpoint, str]:
    """An exportable checkpoint, and the name of the state to export as weights."""
    check_free(into)
    checkpoint = Checkpoint(found.place, found.step)
    check_agrees(checkpoint.manifest, found.name, found.of_run)
    if (module := checkpoint.manifest.identity.get(MODULE)) is not None:
        raise BadInput(
            f"{found.name} is of {module}, a module of a script's own, and only that has its config",
            "run.export(DIR) in the script, which continues from there with dir=",
        )
    if average:
        check_average(checkpoint)
    return checkpoint, AVERAGE if average else "weight"


def check_free(into: Path) -> None:
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise BadInput(f"{into} exists and is not empty", "name a directory that does not exist yet")


@contextmanager
def written_aside(into: Path) -> Iterator[Path]:
    """A directory to write to, under a temporary name; renamed when it is complete and on disk."""
    aside = into.with_name(f".{into.name}.unfinished-{os.getpid()}")
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
    except OSError as error:
        raise BadInput(f"cannot write to {aside.parent}: {error.strerror}", "another directory") from None
    try:
        yield aside
        sync_directory(aside)
        aside.rename(into)  # replaces an empty directory
        sync_directory(into.absolute().parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _dtype_of(name: str, target: torch.dtype) -> torch.dtype:
    """A router's bias correction selects experts by small differences: it stays in fp32, as published."""
    return torch.float32 if name.endswith(CORRECTION) and target.itemsize < 4 else target


def _contents(source: TensorSource, tensors: list[TensorEntry], target: torch.dtype) -> Iterator[memoryview]:
    """The bytes of these tensors in order, a few rows at a time."""
    for one in tensors:
        dtype = _dtype_of(one.name, target)
        for part in source(one):
            written = part.to(dtype)
            if dtype == torch.float16 and not torch.equal(written.isfinite(), part.isfinite()):
                raise BadInput(f"{one.name} has values beyond the range of fp16", "--dtype bf16")
            yield written.reshape(-1).view(torch.uint8).numpy().data


def export_adapters(
    found: ListedCheckpoint, into: Path, origin: Origin, dtype: str | None = None, average: bool = False
) -> ExportedModel:
    """Export only the adapters, in PEFT's format; all or nothing."""
    checkpoint, state = _opened(found, into, average)
    model = checkpoint.manifest.parsed_model
    if model.adapters is None:
        raise BadInput(f"{found.name} has no adapters: all weights were trained", "--to hf")
    target = DTYPES[dtype] if dtype is not None else checkpoint.dtype("weight")
    base = next((str(path) for path in origin.models), None)
    written = write_peft(into, checkpoint, model, base, target, state)
    named = str(target).removeprefix("torch.")
    return ExportedModel(into, found.step, sum(one.nbytes for one in written), len(written), 1, named)


def _merged_parts(model: Model, fill: Fill, one: TensorEntry) -> Iterator[Tensor]:
    """For a checkpoint of adapters: the base weights with the adapters' products added, a few rows at a time."""
    boxes = views_by_tensor(model)[one.name]
    for start, shape in _row_ranges(one):
        part = torch.empty(shape, dtype=torch.float32)
        for box in boxes:
            first = max(start, box.tensor_offset[0])
            count = min(start + shape[0], box.tensor_offset[0] + box.shape[0]) - first
            if count <= 0:
                continue
            inside = (first - box.tensor_offset[0], *(0 for _ in box.shape[1:]))
            size = (count, *box.shape[1:])
            if box.transposed:
                inside, size = inside[::-1], size[::-1]
            if box.stacked:
                inside, size = (0, *inside), (1, *size)
            offset = tuple(a + b for a, b in zip(box.canonical_offset, inside, strict=True))
            values = torch.empty(size)
            fill([(box.canonical, Slice(values, by_name(model)[box.canonical].shape, offset))])
            corner = (first - start, *box.tensor_offset[1:])
            part[box_slices(corner, (count, *box.shape[1:]))] = (
                values[0] if box.stacked else values.T if box.transposed else values
            )
        yield part


def _parts(checkpoint: Checkpoint, state: str, one: TensorEntry) -> Iterator[Tensor]:
    for start, shape in _row_ranges(one):
        part = torch.empty(shape, dtype=checkpoint.dtype(state, one.name))
        offset = (start, *(0 for _ in shape[1:]))
        checkpoint.read([Wanted(state, one.name, offset, part)])
        yield part


def _row_ranges(one: TensorEntry) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The offset and shape of each of a tensor's parts."""
    rows, width = one.shape[0], math.prod(one.shape[1:])
    step = max(AT_ONCE // width, 1)
    for start in range(0, rows, step):
        yield start, (min(step, rows - start), *one.shape[1:])
