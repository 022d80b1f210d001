"""All data of a run under one path: the training data, one dataset or a mix, and the validation sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal.facts.input.untrusted_files import read_json
from shoal.facts.problem import BadInput
from shoal.train.data.dataset import Dataset
from shoal.train.files import replace_text

LIST = "collection.json"


@dataclass(frozen=True)
class Collection:
    """Prepared datasets; ``weights`` are a mix's weights of its parts, as in JSON."""

    path: Path
    parts: tuple[Dataset, ...]
    weights: Sequence[Any] = ()
    validation: Mapping[str, Dataset] = field(default_factory=dict)

    @property
    def everything(self) -> tuple[Dataset, ...]:
        return (*self.parts, *self.validation.values())

    @property
    def fingerprint(self) -> str:
        """A hash of all training data. Validation sets do not affect a run's identity."""
        if len(self.parts) == 1:
            return self.parts[0].fingerprint
        content = [[part.fingerprint for part in self.parts], list(self.weights)]
        return blake3(json.dumps(content).encode()).hexdigest()

    @staticmethod
    def open(path: Path) -> Collection:
        """Open what ``gather`` wrote, or a single prepared dataset."""
        try:
            content = read_json(path / LIST)
        except FileNotFoundError:
            return Collection(path, (Dataset.open(path),))
        try:
            parts = tuple(Dataset.open(Path(part)) for part in content["parts"])
            named = {name: Dataset.open(Path(one)) for name, one in content["validation"].items()}
            return Collection(path, parts, content["weights"], named)
        except (KeyError, TypeError, AttributeError):
            raise BadInput(
                f"{str(path / LIST)!r} is damaged", f"delete {str(path)!r} and run again"
            ) from None


def gather(
    cache: Path, parts: Sequence[Path], weights: Sequence[Any], validation: Mapping[str, Path]
) -> Path:
    """One path for all of them. A single dataset keeps its own."""
    if len(parts) == 1 and not validation:
        return parts[0]
    content = {
        "parts": [str(part.absolute()) for part in parts],
        "weights": list(weights),
        "validation": {name: str(path.absolute()) for name, path in validation.items()},
    }
    text = json.dumps(content, indent=2)
    directory = cache / f"collection-{blake3(text.encode()).hexdigest()[:24]}"
    directory.mkdir(parents=True, exist_ok=True)
    replace_text(directory / LIST, text)
    return directory
