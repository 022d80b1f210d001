"""Convert parameters to and from Hugging Face's tensors along the views in ``facts``; read slices of weight files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.facts.input.untrusted_files import parse_json, read_bytes
from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import intersect, tensors_of_parameters, views_by_tensor
from shoal.facts.model.parameters import parameters
from shoal.facts.model.tensor_split import box_slices
from shoal.facts.problem import BadInput
from shoal.models.initial import Slice, whole

# Reads a box of a Hugging Face tensor: its name, the box's offset, its shape.
ReadBox = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]

INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 1 << 28
# How a file begins that stands for one which Git LFS has not fetched.
POINTER = b"version https://git-lfs"
# A block's number, in every family's names.
BLOCK = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
FLOATS = ("F64", "F32", "BF16", "F16")
# Elements copied at a time from a file.
AT_ONCE = 1 << 23
# Close a mapped file after this many bytes, since read pages count as this process's memory until then.
MOST_MAPPED = 1 << 26


def from_tensors(model: Model, read: Callable[[str], Tensor], canonical: Mapping[str, Tensor]) -> None:
    """Fill our whole parameters from Hugging Face's tensors."""

    def box(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return read(name)[box_slices(offset, shape)]

    fill_slices(model, box, ((name, whole(name, tensor)) for name, tensor in canonical.items()))


@torch.no_grad()
def fill_slices(model: Model, read: ReadBox, slices: Iterable[tuple[str, Slice]]) -> None:
    """Fill slices of our parameters from Hugging Face's tensors, reading only what is needed."""
    wanted: dict[str, list[Slice]] = {}
    for name, part in slices:
        wanted.setdefault(name, []).append(part)
    every, of = views_by_tensor(model), tensors_of_parameters(model)
    # Each once, in the order requested: a caller may ask for a single tensor.
    for name in dict.fromkeys(tensor for parameter in wanted for tensor in of.get(parameter, ())):
        for box in every[name]:
            for part in wanted.get(box.canonical, ()):
                overlap = intersect(box, part.offset, tuple(part.local.shape))
                if overlap is None:
                    continue
                ours = part.local[box_slices(overlap.slice_offset, overlap.slice_shape)]
                ours = ours[0] if box.stacked else ours.T if box.transposed else ours
                for start, stop in _row_ranges(overlap.tensor_shape):
                    first, *rest = overlap.tensor_offset
                    shape = (stop - start, *overlap.tensor_shape[1:])
                    ours[start:stop].copy_(read(name, (first + start, *rest), shape))


def _row_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    step = max(AT_ONCE // math.prod(shape[1:]), 1)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _is_pointer(path: Path) -> bool:
    """Whether Git cloned where a file is, in its place."""
    try:
        with path.open("rb") as file:
            return file.read(len(POINTER)) == POINTER
    except OSError:
        return False


def _instead(directory: Path) -> str:
    """What to do about a directory without weights that are read, by what else is there."""
    if next(directory.glob("*.incomplete"), None) is not None:
        return "it was not downloaded whole: download the rest"
    if next(directory.glob("*.bin"), None) is not None:
        return "*.bin files hold pickled code, which is not run: save the model again, by save_pretrained"
    return "a Hugging Face model directory (config.json and *.safetensors), a run or a checkpoint"


class WeightFiles:
    """The tensors of a model directory's safetensors files, by name. Created once per process; checks everything."""

    def __init__(self, directory: Path, model: Model) -> None:
        self.directory = directory
        self._file_of: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        self._mapped = 0
        for path in self._indexed() or sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    self._file_of.update(dict.fromkeys(file.keys(), path))
            except (SafetensorError, OSError) as error:
                if _is_pointer(path):
                    raise BadInput(
                        f"model.init_from: {path} is a pointer of Git LFS, and no weights", "git lfs pull"
                    ) from None
                raise BadInput(
                    f"model.init_from: {path} cannot be read, it is damaged or was not downloaded whole: {error}",
                    "download it again",
                ) from None
        if not self._file_of:
            raise BadInput(f"model.init_from: no *.safetensors files in {directory}", _instead(directory))
        # Some published files hold the bare decoder, without the language model's prefix.
        self._prefixes = ("", "model.", "transformer.", "gpt_neox.")
        self.check(model)

    def _indexed(self) -> list[Path]:
        """The files listed in the index, if there is one. Raises if some are missing, as after a partial download."""
        path = self.directory / INDEX
        if not path.is_file():
            return []
        try:
            named = set(parse_json(read_bytes(path, LARGEST_INDEX))["weight_map"].values())
            missing = sorted(name for name in named if not (self.directory / str(name)).is_file())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(
                f"model.init_from: {path} cannot be read as an index", "download it again"
            ) from None
        if missing:
            raise BadInput(
                f"model.init_from: {self.directory} lacks {len(missing)} of the {len(named)} files "
                f"that {INDEX} names: {missing[0]}{', …' * (len(missing) > 1)}",
                "it was not downloaded whole: download the rest",
            )
        return sorted(self.directory / name for name in named)

    def check(self, model: Model) -> None:
        """Check that every tensor exists, with a trainable dtype and the model's shape; reports everything at once."""
        wanted = list(parameters(model))
        lacking, quantized, others = [], [], []
        for parameter in wanted:
            found = self._find(parameter.name)
            if found is None:
                lacking.append(parameter.name)
                continue
            held = self._slice(found)
            shape, dtype = tuple(held.get_shape()), held.get_dtype()
            if dtype not in FLOATS:
                quantized.append(f"{parameter.name} is stored as {dtype}")
            elif shape != parameter.shape:
                others.append(f"{parameter.name} is {shape}, {model.name} has {parameter.shape}")
        self.close()
        where = f"model.init_from: {self.directory}"
        if quantized:
            raise BadInput(
                f"{where}: {quantized[0]}, and {len(quantized) - 1} more so",
                f"weights in {', '.join(FLOATS)}: quantized ones are not trained",
            )
        if others:
            more = f", and {len(others) - 1} more differ" * (len(others) > 1)
            raise BadInput(
                f"{where}: {others[0]}{more}", f"its own shape: model.path = {str(self.directory)!r}"
            )
        if lacking:
            raise BadInput(
                f"{where} lacks {len(lacking)} of the {len(wanted)} tensors of {model.name}: "
                f"{lacking[0]}{', …' * (len(lacking) > 1)}",
                "if it was not downloaded whole, download the rest; if these are weights of another model, "
                f"model.path = {str(self.directory)!r}",
            )

        if unknown := self._without_place({one.name for one in wanted}, model.layers):
            raise BadInput(
                f"{where} holds {len(unknown)} tensors that {model.name} has no place for: "
                f"{unknown[0]}{', …' * (len(unknown) > 1)}",
                "the config.json that these weights were saved with; without these tensors it is another network",
            )

    def _without_place(self, wanted: set[str], layers: int) -> list[str]:
        """Weights of the model's blocks, and biases beside weights of its own, that it does not have.

        Buffers, which older files hold, are neither; nor are blocks behind the last, which predict further tokens.
        """
        known = {name.removeprefix(prefix) for prefix in self._prefixes for name in wanted}
        found = []
        for name in self._file_of.keys() - known:
            block = BLOCK.search(name)
            own = block is not None and int(block[1]) < layers and name.endswith(".weight")
            beside = f"{name.removesuffix('.bias')}.weight"
            if own or (name.endswith(".bias") and beside in known):
                found.append(name)
        return sorted(found)

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A box of a tensor; nothing else of it is copied."""
        found = self._find(name)
        assert found is not None, name
        tensor: Tensor = self._slice(found)[box_slices(offset, shape)]
        self._mapped += tensor.nbytes
        if self._mapped > MOST_MAPPED:
            self.close()
        return tensor

    def close(self) -> None:
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
        self._open, self._mapped = None, 0

    def _slice(self, found: str) -> Any:
        path = self._file_of[found]
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = path, safe_open(path, framework="pt").__enter__()
        return self._open[1].get_slice(found)

    def _find(self, name: str) -> str | None:
        for prefix in self._prefixes:
            if name.startswith(prefix) and name.removeprefix(prefix) in self._file_of:
                return name.removeprefix(prefix)
        return None
