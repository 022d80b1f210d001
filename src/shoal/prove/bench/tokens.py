"""The tokens that every peer trains on: random ids over the whole vocabulary, as a dataset for Shoal's loader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from shoal.plan.resolve import Job
from shoal.train.data.dataset import MANIFEST, QUARANTINE, Dataset
from shoal.train.data.loader import Loader
from shoal.train.data.order import GlobalOrder
from shoal.train.data.samples import Samples
from shoal.train.data.shards import FORMAT, HashedFile, SplitWriter, write_manifest

# Rows differ for this many steps; a longer run repeats them.
DISTINCT_STEPS = 64


def write_tokens(job: Job, steps: int, directory: Path) -> Path:
    """A prepared dataset with rows for this many steps. Uniform over the vocabulary, as a real one's rows nearly are.

    With few distinct ids an embedding's gradient would be a hot spot that no real text has.
    """
    recipe = job.config.recipe
    directory.mkdir()
    count = min(steps, DISTINCT_STEPS) * recipe.batch * recipe.seq + 1
    drawn = np.random.default_rng(recipe.seed).integers(0, job.model.vocab, count)
    dtype = np.dtype("<u2" if job.model.vocab <= 1 << 16 else "<u4")
    splits = {name: SplitWriter(directory, name) for name in ("train", "heldout")}
    splits["train"].append(drawn.astype(dtype), np.array([count]))
    files = {QUARANTINE: HashedFile(directory / QUARANTINE).close()}
    for split in splits.values():
        split.close()
        files.update(split.files)
    manifest = {
        "format": FORMAT,
        "source": {"text": "random ids", "files": 0, "bytes": 0},
        "field": "text",
        "tokenizer": {"text": "none", "fingerprint": "none", "vocab": job.model.vocab},
        "end": 0,
        "dtype": dtype.str,
        "largest_id": int(drawn.max()),
        "heldout": 0,
        "splits": {name: split.describe() for name, split in splits.items()},
        "rows": 1,
        "bad_rows": {},
        "files": files,
    }
    write_manifest(directory / MANIFEST, json.loads(json.dumps(manifest)))
    return directory


def open_loader(job: Job, directory: Path) -> Loader:
    """The loader of ``shoal train`` on these tokens: the same order of rows for all peers."""
    recipe = job.config.recipe
    stream = Dataset.open(directory).train
    samples = Samples(stream, recipe.seq, packing=True, within_documents=False, pad=0)
    return Loader(samples, GlobalOrder(recipe.seed, len(samples)), recipe.clock)
