"""Encode the documents of one task into token spool files."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from shoal.train.data.row_format import RowFormat, SourceText
from shoal.train.data.rows import PIECE_BYTES, FilePiece, read
from shoal.train.data.tokenizers import Tokenizer, open_tokenizer

BATCH_CHARACTERS = 1 << 20  # text passed to the tokenizer per call


@dataclass(frozen=True)
class EncodeTask:
    """One unit of work for a worker. The grouping of pieces never affects the result."""

    number: int
    pieces: tuple[FilePiece, ...]
    spool: Path
    reading: RowFormat

    @property
    def bytes(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    def file(self, suffix: str) -> Path:
        """``tokens``: ids. ``answers``: one byte per token. ``ends``: int64 offsets. ``hashes``: 8 bytes per document.

        ``bad``: JSON lines, each with its piece and line.
        """
        return self.spool / f"{self.number:08d}.{suffix}"


@dataclass(frozen=True)
class Encoded:
    """Statistics of a task's spool files."""

    tokens: int
    documents: int
    largest: int  # id; -1 when there are no tokens
    rows: int
    reasons: dict[str, int]  # bad rows by reason
    lines: tuple[int, ...]  # in each piece


def group(pieces: Iterable[FilePiece], spool: Path, reading: RowFormat) -> Iterator[EncodeTask]:
    """Group pieces into tasks of about ``PIECE_BYTES``, so that a thousand small files are not a thousand tasks."""
    number, waiting, size = 0, [], 0
    for piece in pieces:
        waiting.append(piece)
        size += piece.stop - piece.start
        if size >= PIECE_BYTES:
            yield EncodeTask(number, tuple(waiting), spool, reading)
            number, waiting, size = number + 1, [], 0
    if waiting:
        yield EncodeTask(number, tuple(waiting), spool, reading)


def encode(task: EncodeTask, tokenizer: Tokenizer) -> Encoded:
    """Read, tokenise and spool the pieces of one task."""
    with (
        task.file("tokens").open("wb") as tokens_file,
        task.file("ends").open("wb") as ends_file,
        task.file("answers").open("wb") as answers_file,
        task.file("hashes").open("wb") as hashes_file,
        task.file("bad").open("w", encoding="utf-8") as bad_file,
    ):
        tokens, documents, largest, rows = 0, 0, -1, 0
        reasons: Counter[str] = Counter()
        lines: list[int] = []
        for batch in _batches(task):
            for bad in batch.bad:
                reasons[bad["reason"]] += 1
                bad_file.write(json.dumps(bad) + "\n")
            rows += batch.rows
            lines += batch.lines
            ids, answers, ends = _join(batch, tokenizer)
            tokens_file.write(ids.tobytes())
            hashes_file.write(b"".join(batch.hashes))
            if task.reading.answers_only:
                answers_file.write(answers.tobytes())
            ends_file.write((ends + tokens).tobytes())
            tokens += len(ids)
            documents += len(ends)
            largest = max(largest, int(ids.max()) if len(ids) else -1)
    return Encoded(tokens, documents, largest, rows, dict(reasons), tuple(lines))


def token_type(tokenizer: Tokenizer) -> np.dtype:
    """The narrowest dtype that holds every id."""
    return np.dtype("<u2") if tokenizer.vocab <= 1 << 16 else np.dtype("<u4")


class _Batch:
    """Texts waiting for the tokenizer, and bookkeeping for them."""

    def __init__(self) -> None:
        self.documents: list[SourceText] = []
        self.closes: list[bool] = []  # whether the document ends with this text
        self.hashes: list[bytes] = []  # of documents that are here in full
        self.characters = 0
        self.bad: list[dict[str, Any]] = []
        self.rows = 0
        self.lines: list[int] = []  # line counts of finished pieces

    def add(self, document: SourceText, closes: bool, begins: bool = True) -> None:
        self.documents.append(document)
        if begins and closes:
            self.hashes.append(blake3(document.text.encode()).digest(8))
        self.closes.append(closes)
        self.characters += len(document.text)

    def encoded(self, tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
        """The ids of each text and, for each id, whether it is trained on."""
        texts = [document.text for document in self.documents]
        if all(document.answers is None for document in self.documents):
            return [(ids, np.ones(len(ids), dtype=np.uint8)) for ids in tokenizer.encode_batch(texts)]
        placed = zip(self.documents, tokenizer.encode_placed(texts), strict=True)
        return [(ids, _in_answers(stops, document)) for document, (ids, stops) in placed]


def _batches(task: EncodeTask) -> Iterator[_Batch]:
    batch = _Batch()
    for number, piece in enumerate(task.pieces):
        is_text = piece.file.kind == "text"
        line = 0
        for row in read(piece, task.reading):
            if row.documents is not None:
                batch.rows += 1
                for document in row.documents:
                    batch.add(document, piece.closes or not is_text, piece.start == 0 or not is_text)
            elif row.reason:
                batch.rows += 1
                batch.bad.append(
                    {"piece": number, "line": line + 1, "reason": row.reason, "start": row.shown}
                )
                if is_text and piece.start > 0 and piece.closes:
                    # The document began in earlier pieces and still has to end.
                    batch.add(SourceText(""), closes=True, begins=False)
            line += row.lines
            if batch.characters >= BATCH_CHARACTERS or len(batch.bad) >= 1000:
                yield batch
                batch = _Batch()
        batch.lines.append(line)
    yield batch


def _in_answers(stops: np.ndarray, document: SourceText) -> np.ndarray:
    """Whether each token's last character is in an answer; ``stops``: the character index after each token."""
    inside = np.zeros(len(stops), dtype=np.uint8)
    for start, stop in document.answers or ():
        inside |= ((stops > start) & (stops <= stop)).astype(np.uint8)
    return inside


def _join(batch: _Batch, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All ids concatenated, whether each is trained on, and the offsets where documents end.

    Each document that closes gets the end id, unless its template gave it one; it is trained on if the token before it
    is.
    """
    dtype = token_type(tokenizer)
    end = np.array([tokenizer.end], dtype=dtype)
    # There may be no text at all.
    parts, learned = [np.empty(0, dtype=dtype)], [np.empty(0, dtype=np.uint8)]
    lengths = []
    for document, closed, (ids, mask) in zip(
        batch.documents, batch.closes, batch.encoded(tokenizer), strict=True
    ):
        parts.append(ids.astype(dtype, copy=False))
        learned.append(mask)
        lengths.append(len(ids))
        if closed and not (document.conversation and tokenizer.has_end(document.text)):
            parts.append(end)
            learned.append(mask[-1:] if len(mask) else np.ones(1, dtype=np.uint8))
            lengths[-1] += 1
    ends = np.cumsum(lengths, dtype="<i8")[np.array(batch.closes, dtype=bool)]
    return np.concatenate(parts), np.concatenate(learned), ends


# A worker opens its tokenizer once, not once per task.
open_once = functools.cache(open_tokenizer)
