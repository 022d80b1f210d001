"""Write a safetensors file part by part: the header first, then each tensor's bytes as they come. Needs no torch.

The ``safetensors`` package writes a file from tensors that are all in memory. A model's are not, so the format is
written here: eight bytes with the header's length, the header in JSON, the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from shoal.train.files import sync_directory

INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
# For buffers.
ITEM_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FILE_BYTES = 5 * 10**9  # the default limit per file
ALIGNMENT = 8  # of the tensors: readers memory-map them
_WRITTEN_AT_ONCE = 1 << 26


class TensorEntry(NamedTuple):
    """A tensor as the header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def cut_into_files(tensors: Iterable[TensorEntry], most: int) -> dict[str, list[TensorEntry]]:
    """Distribute tensors over files in order, up to ``most`` bytes per file, under the names that readers look for."""
    files: list[list[TensorEntry]] = [[]]
    size = 0
    for one in tensors:
        if files[-1] and size + one.bytes > most:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.bytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": held
        for number, held in enumerate(files, start=1)
    }


def index_of(files: Mapping[str, list[TensorEntry]]) -> str:
    """The index: which tensor is in which file."""
    total = sum(one.bytes for held in files.values() for one in held)
    where = {one.name: file for file, held in files.items() for one in held}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"


def write_weights_file(path: Path, tensors: list[TensorEntry], contents: Iterable[memoryview]) -> None:
    """``contents``: the bytes of all tensors in order, in parts of any size. On disk when this returns."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for one in tensors:
        ends = [position, position + one.bytes]
        header[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": ends}
        position = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    written = 0
    with path.open("wb", buffering=0) as file:
        for part in (memoryview(len(text).to_bytes(8, "little")), memoryview(text)):
            _write_all(file.fileno(), part)
        for part in contents:
            written += part.nbytes
            _write_all(file.fileno(), part)
        os.fsync(file.fileno())
    assert written == position, f"{path.name}: {written} bytes of {position}"
    sync_directory(path.parent)


def _write_all(handle: int, content: memoryview) -> None:
    content = content.cast("B")
    while content.nbytes:
        content = content[os.write(handle, content[:_WRITTEN_AT_ONCE]) :]
