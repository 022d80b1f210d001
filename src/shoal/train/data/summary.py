"""Statistics of prepared data: documents, tokens, duplicates, the longest, rows left out, epochs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shoal.facts.config import Config
from shoal.facts.problem import BadInput
from shoal.train.data.collection import Collection
from shoal.train.data.dataset import QUARANTINE, Dataset
from shoal.train.data.samples import cut_samples
from shoal.train.data.tokenizers import open_tokenizer


@dataclass(frozen=True)
class DatasetSummary:
    """Statistics of one prepared directory."""

    name: str  # its source, or the validation set's name
    path: str
    documents: int
    tokens: int
    heldout_documents: int
    heldout_tokens: int
    duplicates: int  # repeats of earlier documents
    longest: int  # tokens of the longest document
    quarantined: int
    reasons: dict[str, int]

    def lines(self) -> Iterator[str]:
        yield f"{self.name}: {self.documents:,} documents, {self.tokens:,} tokens, the longest has {self.longest:,}"
        if self.heldout_documents:
            yield f"  held out: {self.heldout_documents:,} documents, {self.heldout_tokens:,} tokens"
        if self.duplicates:
            yield f"  duplicates: {self.duplicates:,} documents are there already; they are kept"
        if self.quarantined:
            reasons = ", ".join(f"{reason}: {count:,}" for reason, count in self.reasons.items())
            yield f"  quarantined: {self.quarantined:,} rows ({reasons}); see {self.path}/{QUARANTINE}"


@dataclass(frozen=True)
class DataSummary:
    """Statistics of all data of a run, with the number of epochs of its training data."""

    parts: tuple[DatasetSummary, ...]
    validation: tuple[DatasetSummary, ...]
    samples: int
    steps: int
    epochs: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        for one in (*self.parts, *self.validation):
            yield from one.lines()
        if not self.samples:
            yield "too little for one sample of recipe.seq tokens"
            return
        yield f"{self.samples:,} samples: {self.steps:,} steps are {self.epochs:.3g} epochs"


def summarise(config: Config, data: Collection) -> DataSummary:
    recipe, tokenizer = config.recipe, open_tokenizer(config.data.tokenizer, config.data.end_token)
    try:
        samples = len(cut_samples(data, config.data, recipe.seq, tokenizer.end).train)
    except BadInput:  # too small for one sample; a recipe with shorter sequences may have some
        samples = 0
    steps = recipe.steps if recipe.epochs is None else recipe.clock.steps_for_epochs(recipe.epochs, samples)
    names = [part.source for part in config.data.parts]
    return DataSummary(
        tuple(_summary(name, part) for name, part in zip(names, data.parts, strict=True)),
        tuple(_summary(name, one) for name, one in data.validation.items()),
        samples,
        steps,
        recipe.clock.before(steps + 1) / samples if samples else 0.0,
    )


def described(config: Config, data: Collection) -> list[dict[str, Any]]:
    """Every dataset of a run, for its manifest: its purpose, its size, and which rows were left out."""
    names = [part.source for part in config.data.parts]
    parts = [("training", name, part) for name, part in zip(names, data.parts, strict=True)]
    parts += [("validation", name, one) for name, one in data.validation.items()]
    fields = ("documents", "tokens", "heldout_documents", "heldout_tokens", "path")
    found = []
    for role, name, dataset in parts:
        told = asdict(_summary(name, dataset))
        rows, bad = dataset.manifest.get("rows"), dataset.manifest["bad_rows"]
        found.append(
            {
                "source": name,
                "role": role,
                **{key: told[key] for key in fields},
                "rows": rows,
                "bad_rows": bad,
            }
        )
    return found


def _summary(name: str, dataset: Dataset) -> DatasetSummary:
    manifest = dataset.manifest
    train, heldout = manifest["splits"]["train"], manifest["splits"]["heldout"]
    return DatasetSummary(
        name,
        str(dataset.path),
        train["documents"] + heldout["documents"],
        train["tokens"] + heldout["tokens"],
        heldout["documents"],
        heldout["tokens"],
        manifest.get("duplicates", 0),
        manifest.get("longest", 0),
        sum(manifest["bad_rows"].values()),
        manifest["bad_rows"],
    )
