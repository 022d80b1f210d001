"""Convert parameters to and from Hugging Face's tensors along the views in ``facts``; read weight files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import View, intersect, views
from shoal.facts.model.parameters import parameters
from shoal.facts.model.tensor_split import box_slices
from shoal.facts.problem import BadInput, Problem
from shoal.models.initial import Slice, whole


def from_tensors(model: Model, read: Callable[[str], Tensor], canonical: Mapping[str, Tensor]) -> None:
    """Fill whole parameters of ours from Hugging Face's tensors, each read once."""
    fill_slices(model, read, ((name, whole(name, tensor)) for name, tensor in canonical.items()))


@torch.no_grad()
def fill_slices(model: Model, read: Callable[[str], Tensor], slices: Iterable[tuple[str, Slice]]) -> None:
    """Fill parts of our parameters from Hugging Face's tensors: each that has such a part is read once."""
    wanted: dict[str, list[Slice]] = {}
    for name, part in slices:
        wanted.setdefault(name, []).append(part)
    for name, boxes in _by_tensor(model):
        tensor: Tensor | None = None
        for box in boxes:
            for part in wanted.get(box.canonical, ()):
                overlap = intersect(box, part.offset, tuple(part.local.shape))
                if overlap is None:
                    continue
                tensor = read(name) if tensor is None else tensor
                theirs = tensor[box_slices(overlap.tensor_offset, overlap.tensor_shape)]
                ours = part.local[box_slices(overlap.slice_offset, overlap.slice_shape)]
                ours.copy_(theirs.T if box.transposed else theirs)  # one expert is a stack of one


def _by_tensor(model: Model) -> Iterator[tuple[str, list[View]]]:
    """Each of Hugging Face's tensors with the boxes that it is made of."""
    for name, boxes in itertools.groupby(views(model), key=lambda view: view.tensor):
        yield name, list(boxes)


class WeightFiles:
    """The tensors of a model directory's safetensors files, by name."""

    def __init__(self, directory: Path, model: Model) -> None:
        self.directory = directory
        self._file_of: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    self._file_of.update(dict.fromkeys(file.keys(), path))
            except (SafetensorError, OSError) as error:
                raise BadInput(
                    f"model.init_from: {path} cannot be read: {error}", "download it again"
                ) from None
        if not self._file_of:
            raise BadInput(
                f"model.init_from: no *.safetensors files in {directory}",
                "a Hugging Face model directory: config.json and *.safetensors",
            )
        # Some published files hold the bare decoder, without the prefix its language model adds.
        self._prefixes = ("", "model.", "transformer.", "gpt_neox.")
        self.check(model)

    def check(self, model: Model) -> None:
        """Every tensor there, with the model's shape; else everything that is wrong, at once."""
        problems = []
        for parameter in parameters(model):
            found = self._find(parameter.name)
            if found is None:
                problems.append(Problem(f"model.init_from: {self.directory} has no {parameter.name}"))
                continue
            with safe_open(self._file_of[found], framework="pt") as file:
                shape = tuple(file.get_slice(found).get_shape())
            if shape != parameter.shape:
                problems.append(
                    Problem(
                        f"model.init_from: {parameter.name} is {shape}, {model.name} has {parameter.shape}"
                    )
                )
        if problems:
            shown = problems[:5]
            if len(problems) > len(shown):
                shown.append(Problem(f"model.init_from: and {len(problems) - len(shown)} more tensors"))
            fix = f"model.path = {str(self.directory)!r}"
            raise BadInput([*shown, Problem("these are weights of another model", fix)])

    def read(self, name: str) -> Tensor:
        found = self._find(name)
        assert found is not None, name
        with safe_open(self._file_of[found], framework="pt") as file:
            return file.get_tensor(found)

    def _find(self, name: str) -> str | None:
        for prefix in self._prefixes:
            if name.startswith(prefix) and name.removeprefix(prefix) in self._file_of:
                return name.removeprefix(prefix)
        return None
