"""Merge spooled tokens into one stream per split, in files of bounded size, with a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from blake3 import blake3

from shoal.train.data.order import mix

FORMAT = 1  # raise it when equal sources would no longer give equal files
SHARD_TOKENS = 1 << 28
BLOCK_TOKENS = 1 << 24  # tokens in memory at once
# With fewer documents than this, holding out whole ones would take far too much, too little or nothing.
FEW_DOCUMENTS = 32


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive tokens of the whole source. The last document may continue in the next block."""

    tokens: np.ndarray
    ends: np.ndarray  # offsets in the block just after the documents that end in it
    answers: np.ndarray | None = None  # one byte per token: whether it is trained on; None: all are


class SplitWriter:
    """Writes ``NAME-00000.bin``, … and ``documents-NAME.bin`` (int64 offsets just after each document).

    If only some tokens are trained on, ``NAME_answers-00000.bin``, … have one byte per token of a shard.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.tokens = self.documents = 0
        self.shards: list[str] = []
        self.files: dict[str, dict[str, Any]] = {}
        self._index = HashedFile(directory / f"documents-{name}.bin")
        self._shard: HashedFile | None = None
        self._answers: HashedFile | None = None

    def append(self, tokens: np.ndarray, ends: np.ndarray, answers: np.ndarray | None = None) -> None:
        self._index.write((ends + self.tokens).astype("<i8").tobytes())
        self.documents += len(ends)
        while len(tokens):
            room = SHARD_TOKENS - self.tokens % SHARD_TOKENS
            if room == SHARD_TOKENS:
                self._next_shard(answers is not None)
            assert self._shard is not None
            self._shard.write(tokens[:room].tobytes())
            if self._answers is not None and answers is not None:
                self._answers.write(answers[:room].tobytes())
                answers = answers[room:]
            self.tokens += min(room, len(tokens))
            tokens = tokens[room:]

    def close(self) -> None:
        self._close_shard()
        self.files[self._index.path.name] = self._index.close()

    def _next_shard(self, with_answers: bool) -> None:
        self._close_shard()
        self.shards.append(f"{self.name}-{len(self.shards):05d}.bin")
        self._shard = HashedFile(self.directory / self.shards[-1])
        if with_answers:
            self._answers = HashedFile(self.directory / answers_file(self.shards[-1]))

    def _close_shard(self) -> None:
        for file in (self._shard, self._answers):
            if file is not None:
                self.files[file.path.name] = file.close()

    def describe(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "documents": self.documents, "shards": self.shards}


def answers_file(shard: str) -> str:
    """The file that says which tokens of a shard are trained on."""
    return shard.replace("-", "_answers-")


class HashedFile:
    """A new file that is hashed as it is written, and fsynced on close."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("xb")
        self._hash, self._size = blake3(max_threads=blake3.AUTO), 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)
        self._size += len(content)

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._size, "blake3": self._hash.hexdigest()}


def spooled_blocks(
    tokens_path: Path, ends_path: Path, answers_path: Path | None, dtype: np.dtype
) -> Iterator[TokenBlock]:
    """A task's spooled tokens, in blocks that fit in memory."""
    ends = np.fromfile(ends_path, dtype="<i8")
    count = tokens_path.stat().st_size // dtype.itemsize
    for start in range(0, count, BLOCK_TOKENS):
        tokens = np.fromfile(tokens_path, dtype=dtype, count=BLOCK_TOKENS, offset=start * dtype.itemsize)
        first, last = np.searchsorted(ends, [start, start + len(tokens)], side="right")
        answers = None
        if answers_path is not None:
            answers = np.fromfile(answers_path, dtype=np.uint8, count=BLOCK_TOKENS, offset=start)
        yield TokenBlock(tokens, ends[first:last] - start, answers)


def is_held_out(numbers: np.ndarray, fraction: float) -> np.ndarray:
    """Whether each document is held out: a hash of its number, and of nothing else."""
    return (mix(numbers.astype(np.uint64)) >> np.uint64(11)) < np.uint64(int(fraction * (1 << 53)))


def whole_documents_work(documents: int, fraction: float) -> bool:
    """Whether holding out whole documents leaves some on either side."""
    if documents < FEW_DOCUMENTS:
        return False
    chosen = is_held_out(np.arange(min(documents, 1 << 20)), fraction)
    return bool(chosen.any() and not chosen.all())


def split_by_document(
    blocks: Iterator[TokenBlock],
    fraction: float,
    train: SplitWriter,
    heldout: SplitWriter,
    together: int = 1,
) -> None:
    """``together``: how many consecutive documents stay on the same side."""
    number = 0  # number of the block's first document
    for block in blocks:
        # The lengths of the block's documents; the part after the last end is one too, and ends in a later block.
        lengths = np.diff(block.ends, prepend=0, append=len(block.tokens))
        closed = np.arange(len(lengths)) < len(block.ends)
        held = is_held_out((number + np.arange(len(lengths))) // together, fraction)
        token_held = np.repeat(held, lengths)
        for writer, documents, tokens in ((train, ~held, ~token_held), (heldout, held, token_held)):
            ends = np.cumsum(lengths[documents])[closed[documents]]
            writer.append(
                block.tokens[tokens], ends, None if block.answers is None else block.answers[tokens]
            )
        number += len(block.ends)


def split_at(
    blocks: Iterator[TokenBlock], cut: int, end: int, train: SplitWriter, heldout: SplitWriter
) -> None:
    """Put the first ``cut`` tokens into training and hold out the rest. A document cut in two ends twice.

    Conversations are split between two of them, never inside one.
    """
    position = 0
    for block in blocks:
        here = min(max(cut - position, 0), len(block.tokens))
        mask = block.answers
        before, after = (None, None) if mask is None else (mask[:here], mask[here:])
        train.append(block.tokens[:here], block.ends[block.ends <= here], before)
        if mask is None and position + here == cut and here > 0 and here not in block.ends:
            train.append(np.array([end], dtype=block.tokens.dtype), np.array([1]))
        heldout.append(block.tokens[here:], block.ends[block.ends > here] - here, after)
        position += len(block.tokens)


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Write the manifest with a hash of its own content, so that a flipped digit in it is detected too."""
    file = HashedFile(path)
    file.write(json.dumps({**content, "blake3": manifest_hash(content)}, indent=2).encode())
    file.close()


def manifest_hash(content: dict[str, Any]) -> str:
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()
