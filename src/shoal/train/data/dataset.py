"""A prepared, memory-mapped dataset; opening it reads only the manifest."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from shoal.facts.input.untrusted_files import read_json
from shoal.facts.problem import BadInput, Problem
from shoal.train.data.shards import FORMAT, answers_file, manifest_hash
from shoal.train.data.streamed import MANIFEST, StreamedShards, comes_later, read_origin

QUARANTINE = "bad_rows.jsonl"
MOST = 1 << 62  # limit on any count in a manifest


class TokenStream:
    """All tokens of one split, across its shards, document after document."""

    def __init__(
        self,
        name: str,
        shards: Sequence[np.ndarray] | StreamedShards,
        document_ends: np.ndarray,
        answers: Sequence[np.ndarray] | StreamedShards | None = None,
        fingerprint: str = "",
    ) -> None:
        """``answers``: per shard, whether each token is trained on; None: all are. ``fingerprint``: a hash of
        everything.
        """
        self.name, self.fingerprint = name, fingerprint
        self.document_ends = document_ends  # offsets just after each document
        self.shards, self._answers = shards, answers
        lengths = shards.lengths if isinstance(shards, StreamedShards) else [len(shard) for shard in shards]
        self._starts = np.cumsum([0, *lengths], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shard_starts(self) -> list[int]:
        """The first token of each shard, and the total."""
        return [int(start) for start in self._starts]

    @property
    def has_answers(self) -> bool:
        """Whether only some tokens are trained on."""
        return self._answers is not None

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from ``start`` up to ``stop``, as int64."""
        return self._read(self.shards, start, stop)

    def learned(self, start: int, stop: int) -> np.ndarray:
        """Whether each of these tokens is trained on."""
        if self._answers is None:
            return np.ones(stop - start, dtype=bool)
        return self._read(self._answers, start, stop) != 0

    def _read(self, shards: Sequence[np.ndarray] | StreamedShards, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        tokens = np.empty(stop - start, dtype=np.int64)
        position = start
        while position < stop:
            shard = int(np.searchsorted(self._starts, position, side="right")) - 1
            offset = position - int(self._starts[shard])
            end = min(offset + stop - position, int(self._starts[shard + 1] - self._starts[shard]))
            if isinstance(shards, StreamedShards):
                piece = shards.read(shard, offset, end, goes_on=position > start)
            else:
                piece = shards[shard][offset:end]
            tokens[position - start : position - start + len(piece)] = piece
            position += len(piece)
        return tokens


@dataclass(frozen=True)
class Dataset:
    path: Path
    manifest: dict[str, Any]
    train: TokenStream
    heldout: TokenStream

    @property
    def largest_id(self) -> int:
        return int(self.manifest["largest_id"])

    @property
    def pairs(self) -> bool:
        """Whether documents come in pairs: a chosen answer, then the rejected one."""
        return bool(self.manifest.get("pairs"))

    @property
    def fingerprint(self) -> str:
        """A hash of every token and document end, independent of where they came from or are stored."""
        hashes = {name: file["blake3"] for name, file in self.manifest["files"].items() if name != QUARANTINE}
        return blake3(json.dumps([self.manifest["dtype"], hashes], sort_keys=True).encode()).hexdigest()

    def check_documents(self) -> None:
        """Raise BadInput if the last document does not end at the last token. Checking more would mean reading every
        byte.
        """
        for stream in (self.train, self.heldout):
            ends = stream.document_ends
            if len(ends) and not 0 < int(ends[0]) <= int(ends[-1]) == len(stream):
                what = f"{str(self.path)!r} is damaged: the documents of {stream.name} do not end where its tokens do"
                raise _damaged(self.path, [what])

    @staticmethod
    def open(path: Path, verify: bool = False) -> Dataset:
        """Open a prepared directory. ``verify`` reads and checks every byte, not only the sizes."""
        path = Path(path)
        manifest = read_manifest(path)
        _check_files(path, manifest, verify)
        return Dataset(
            path, manifest, _open_split(path, manifest, "train"), _open_split(path, manifest, "heldout")
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a prepared directory; BadInput unless it is intact and in our format."""
    try:
        manifest = read_json(path / MANIFEST)
    except FileNotFoundError:
        raise _no_dataset(path) from None
    except ValueError as error:
        raise _damaged(path, [f"{str(path / MANIFEST)!r} is damaged: it is not JSON ({error})"]) from None
    # Other directories, such as a run's, have a manifest too. Never tell the user to delete those.
    if not isinstance(manifest, dict) or not {"blake3", "format", "splits"} <= manifest.keys():
        raise _no_dataset(path)
    if manifest["format"] != FORMAT:
        raise _damaged(path, [f"{str(path)!r} has format {manifest['format']}; this version reads {FORMAT}"])
    if manifest.pop("blake3") != manifest_hash(manifest):
        raise _damaged(path, [f"{str(path / MANIFEST)!r} is damaged: its content does not match its hash"])
    try:
        sound = _makes_sense(manifest)
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        # Its hash is right, so it was made by hand.
        raise _damaged(path, [f"{str(path / MANIFEST)!r} is damaged: Shoal writes no such manifest"])
    return manifest


def _makes_sense(manifest: dict[str, Any]) -> bool:
    """Whether all file names stay inside the directory and all numbers are possible for a dataset."""
    files, splits = manifest["files"], manifest["splits"]
    named = [name for split in splits.values() for name in split["shards"]]
    masks = [answers_file(name) for name in named] if manifest.get("answers") else []
    width = {"<u2": 2, "<u4": 4}[manifest["dtype"]]
    counts = [
        *(file["bytes"] for file in files.values()),
        *(split[what] for split in splits.values() for what in ("tokens", "documents")),
        *(manifest[what] for what in ("rows", "end")),
        *manifest["bad_rows"].values(),
        *(manifest.get(what, 0) for what in ("duplicates", "longest")),
        manifest["largest_id"] + 1,
    ]
    texts = [manifest["tokenizer"]["text"], manifest["tokenizer"]["fingerprint"]]
    return (
        set(splits) == {"train", "heldout"}
        and {*named, *masks, QUARANTINE, *(f"documents-{name}.bin" for name in splits)} == set(files)
        and all(re.fullmatch(r"[a-z_]+(-[a-z0-9]+)?\.(bin|jsonl)", name) for name in files)
        and all(type(count) is int and 0 <= count <= MOST for count in counts)
        and all(isinstance(text, str) for text in texts)
        and all(
            split["tokens"] * width == sum(files[name]["bytes"] for name in split["shards"])
            and (
                not masks
                or all(files[answers_file(name)]["bytes"] * width == files[name]["bytes"] for name in named)
            )
            and split["documents"] * 8 == files[f"documents-{which}.bin"]["bytes"]
            and not (manifest.get("pairs") and split["documents"] % 2)
            for which, split in splits.items()
        )
    )


def check_vocabulary(dataset: Dataset, vocab: int) -> None:
    """Raise BadInput if a token of the data has no row in the model's embedding."""
    if dataset.largest_id >= vocab:
        tokenizer = dataset.manifest["tokenizer"]
        raise BadInput(
            f"the data's largest token is {dataset.largest_id} but the model's vocabulary is {vocab}: "
            f"its ids end at {vocab - 1}",
            f"use the model's own tokenizer (data.tokenizer is {tokenizer['text']!r}), "
            f"or a model with a vocabulary of at least {tokenizer['vocab']}",
        )


def _check_files(path: Path, manifest: dict[str, Any], verify: bool) -> None:
    damage = []
    later = comes_later(manifest) if read_origin(path) is not None else set()
    for name, recorded in manifest["files"].items():
        file = path / name
        if name in later:
            continue
        if not file.is_file():
            damage.append(f"{str(file)!r} is missing")
        elif (size := file.stat().st_size) != recorded["bytes"]:
            damage.append(f"{str(file)!r} is damaged: it has {size} bytes, not {recorded['bytes']}")
        elif verify and _hash(file) != recorded["blake3"]:
            damage.append(f"{str(file)!r} is damaged: its content does not match its hash")
    if damage:
        raise _damaged(path, damage)


def _hash(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def _no_dataset(path: Path) -> BadInput:
    return BadInput(
        f"{str(path)!r} is not a prepared dataset: it has no {MANIFEST} of one",
        "name a directory that shoal data prepare made; one inside data.cache may be deleted and is rebuilt",
    )


def _damaged(path: Path, damage: list[str]) -> BadInput:
    fix = f"delete {str(path)!r} and run again: it is rebuilt from the source"
    return BadInput([Problem(what, fix) for what in damage])


def _open_split(path: Path, manifest: dict[str, Any], name: str) -> TokenStream:
    names = manifest["splits"][name]["shards"]
    origin = read_origin(path) if name == "train" else None
    answers = None

    def shards(names: list[str], dtype: np.dtype) -> list[np.ndarray] | StreamedShards:
        if origin is None:
            return [_map(path / shard, dtype) for shard in names]
        return StreamedShards(origin, path, [(shard, manifest["files"][shard]) for shard in names], dtype)

    if manifest.get("answers"):
        answers = shards([answers_file(shard) for shard in names], np.dtype(np.uint8))
    tokens = shards(names, np.dtype(manifest["dtype"]))
    index = f"documents-{name}.bin"
    masks = [answers_file(shard) for shard in names] if manifest.get("answers") else []
    hashes = [manifest["dtype"], *(manifest["files"][file]["blake3"] for file in (*names, *masks, index))]
    fingerprint = blake3(json.dumps(hashes).encode()).hexdigest()
    return TokenStream(name, tokens, _map(path / index, np.dtype("<i8")), answers, fingerprint)


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be memory-mapped.
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")
