"""Cut the token stream into samples of seq + 1 tokens."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from shoal.facts.config import HELDOUT, DataSection
from shoal.facts.problem import BadInput
from shoal.facts.targets import IGNORE
from shoal.train.data.bad_rows import tolerated
from shoal.train.data.collection import Collection
from shoal.train.data.dataset import TokenStream


class Sample(NamedTuple):
    """One sequence; every array is int64 of length seq."""

    tokens: np.ndarray
    targets: np.ndarray  # the token after each, or IGNORE
    documents: np.ndarray  # which document of this row each token belongs to, from 0
    # What the loss compares its log-probability with (``train/reference.py``); NaN: unknown or unused.
    reference: float = math.nan


class Samples:
    """All samples of a stream, by index. Nothing is stored, except one number per document if unpacked.

    Packed, the stream is cut into consecutive pieces: the last token of one is the first of the next, so every token
    but the very first is a target exactly once. A remainder too short for a sample is dropped.

    Packed conversations are not cut, because an answer without its question teaches something else: each sample takes
    as many as fit, and is padded; only a conversation that is too long spans several samples.

    Unpacked, a sample holds one document, or a part of one that is too long, padded to its length.
    """

    together = 1  # consecutive samples that belong together

    def __init__(
        self, stream: TokenStream, seq: int, *, packing: bool, within_documents: bool, pad: int
    ) -> None:
        self.stream, self.seq, self.packing = stream, seq, packing
        self.within_documents, self.pad = within_documents, pad
        self._filled: tuple[np.ndarray, np.ndarray] | None = None
        if packing and stream.has_answers:
            self._filled = _fill(stream.document_ends, seq)
            self._count = len(self._filled[0])
        elif packing:
            self._count = max(0, (len(stream) - 1) // seq)
        else:
            lengths = np.diff(stream.document_ends, prepend=0)
            # A document of one token has no target, so it yields no sample.
            parts = -(-(lengths - 1) // seq)
            self._part_ends = np.cumsum(parts)
            self._count = int(self._part_ends[-1]) if len(parts) else 0
        if self._count == 0:
            raise _too_little(stream, seq, packing)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < self._count:
            raise IndexError(f"sample {number} of {self._count}")
        if self._filled is not None:
            return self._whole(int(self._filled[0][number]), int(self._filled[1][number]))
        return self._packed(number) if self.packing else self._unpacked(number)

    def empty(self) -> Sample:
        """A row without targets: it fills up a batch and counts for nothing."""
        return Sample(
            np.full(self.seq, self.pad, dtype=np.int64),
            np.full(self.seq, IGNORE, dtype=np.int64),
            np.zeros(self.seq, dtype=np.int64),
        )

    @property
    def shard_bounds(self) -> list[int]:
        """The first sample that begins in each shard, and the total."""
        starts = np.array(self.stream.shard_starts[:-1])
        if self._filled is not None:
            found = np.searchsorted(self._filled[0], starts, side="left")
        elif self.packing:
            found = np.minimum(-(-starts // self.seq), self._count)
        else:
            ends = self.stream.document_ends
            document = np.searchsorted(ends, starts, side="right")
            before = np.concatenate([[0], self._part_ends])[document]
            begins = np.concatenate([[0], ends])[document]
            found = np.minimum(before - (-(starts - begins) // self.seq), self._part_ends[document])
        return [*map(int, found), self._count]

    def counted(self, targets: np.ndarray) -> int:
        """The number of targets in these rows, which the loss is a sum over."""
        return int((targets != IGNORE).sum())

    def prompt(self, number: int, tokens: int) -> np.ndarray:
        """A prompt for generation: a sample's first tokens or, for conversations, everything before an answer."""
        if not self.stream.has_answers:
            return self[number].tokens[:tokens]
        ends = self.stream.document_ends
        number %= len(ends)
        start, stop = int(ends[number - 1]) if number else 0, int(ends[number])
        before = int(self.stream.learned(start, stop).argmax())
        return self.stream.read(start, start + max(1, before))[-self.seq :]

    def _targets(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """The token after each but the last; ``start``: their offset in the stream."""
        targets = tokens[1:].copy()
        if self.stream.has_answers:
            targets[~self.stream.learned(start + 1, start + len(tokens))] = IGNORE
        return targets

    def _packed(self, number: int) -> Sample:
        start = number * self.seq
        stop = start + self.seq + 1
        tokens = self.stream.read(start, stop)
        ends = self.stream.document_ends
        first, last = np.searchsorted(ends, [start, stop], side="right")
        documents = np.searchsorted(ends[first:last] - start, np.arange(self.seq + 1), side="right")
        targets = self._targets(tokens, start)
        if self.within_documents:
            targets[documents[1:] != documents[:-1]] = IGNORE
        return Sample(tokens[:-1], targets, documents[:-1].astype(np.int64))

    def _whole(self, start: int, stop: int) -> Sample:
        """A sample of these tokens, padded."""
        text, ends = self.stream.read(start, stop), self.stream.document_ends
        first, last = np.searchsorted(ends, [start, stop], side="right")
        documents = np.searchsorted(ends[first:last] - start, np.arange(len(text)), side="right")
        used = len(text) - 1
        sample = self.empty()
        sample.tokens[:used] = text[:-1]
        sample.targets[:used] = self._targets(text, start)
        if self.within_documents:
            sample.targets[:used][documents[1:] != documents[:-1]] = IGNORE
        sample.documents[:used] = documents[:-1]
        sample.documents[used:] = documents[-1] + 1  # padding belongs to no document
        return sample

    def _unpacked(self, number: int) -> Sample:
        ends = self.stream.document_ends
        document = int(np.searchsorted(self._part_ends, number, side="right"))
        part = number - (int(self._part_ends[document - 1]) if document else 0)
        start = (int(ends[document - 1]) if document else 0) + part * self.seq
        return self._alone(start, min(start + self.seq + 1, int(ends[document])))

    def _alone(self, start: int, stop: int) -> Sample:
        """A sample of these tokens of one document, padded."""
        text = self.stream.read(start, stop)
        used = len(text) - 1
        sample = self.empty()
        sample.tokens[:used] = text[:-1]
        sample.targets[:used] = self._targets(text, start)
        sample.documents[used:] = 1  # padding is not part of the document
        return sample


class PairSamples(Samples):
    """Two samples per pair: a row with the chosen answer, then one with the rejected. Both are whole.

    A pair is dropped if either is longer than a row; a truncated answer would be a different one.
    """

    together = 2

    def __init__(self, stream: TokenStream, seq: int, *, pad: int, most_left_out: float) -> None:
        super().__init__(stream, seq, packing=False, within_documents=False, pad=pad)
        lengths = np.diff(stream.document_ends, prepend=0).reshape(-1, 2)
        fits = np.all((lengths >= 2) & (lengths <= seq + 1), axis=1)
        self._kept = np.flatnonzero(fits)
        self.left_out = len(fits) - len(self._kept)
        allowed = tolerated(len(fits), most_left_out)
        if self.left_out > allowed or not len(self._kept):
            longest = int(lengths.max()) - 1
            raise BadInput(
                f"{self.left_out} of the {len(fits)} pairs are longer than recipe.seq = {seq}, at most {allowed} may "
                f"be; the longest answer with its prompt takes {longest}",
                f"recipe.seq = {longest}, shorter rows, or raise data.max_bad_rows",
            )
        self._count = 2 * len(self._kept)
        self.reference = np.full(self._count, math.nan)

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < self._count:
            raise IndexError(f"sample {number} of {self._count}")
        document = 2 * int(self._kept[number // 2]) + number % 2
        ends = self.stream.document_ends
        sample = self._alone(int(ends[document - 1]) if document else 0, int(ends[document]))
        return sample._replace(reference=float(self.reference[number]))

    def counted(self, targets: np.ndarray) -> int:
        """The number of pairs."""
        return int((targets != IGNORE).any(1).sum()) // 2

    @property
    def shard_bounds(self) -> list[int]:
        begins = np.concatenate([[0], self.stream.document_ends])[2 * self._kept]
        found = np.searchsorted(begins, np.array(self.stream.shard_starts[:-1]), side="left")
        return [*(2 * found).tolist(), self._count]

    def prompt(self, number: int, tokens: int) -> np.ndarray:
        """The prompt that both answers of a pair share."""
        return super().prompt(2 * int(self._kept[number % len(self._kept)]), tokens)


def _fill(ends: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Where samples of whole documents begin and end: each takes as many as fit."""
    found: list[tuple[int, int]] = []
    room = 0  # left in the last sample
    start = 0
    for end in ends.tolist():
        if end - start <= room:
            found[-1] = (found[-1][0], end)
            room -= end - start
        else:
            # The last token of a part is the first of the next, so that every token but the first is a target.
            parts = range(start, max(end - 1, start + 1), seq)
            found += [(part, min(part + seq + 1, end)) for part in parts]
            room = seq + 1 - (found[-1][1] - found[-1][0])
        start = end
    kept = [span for span in found if span[1] - span[0] > 1]  # a single token has no target
    starts, stops = (np.array([span[side] for span in kept], dtype=np.int64) for side in (0, 1))
    return starts, stops


class JoinedSamples:
    """Samples of several streams, stream after stream."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = list(parts)
        self._ends = list(accumulate(map(len, self.parts)))
        self.seq, self.within_documents = self.parts[0].seq, self.parts[0].within_documents
        self.together, self.counted = self.parts[0].together, self.parts[0].counted

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Sample:
        return self._part(number)[self._place(number)]

    def empty(self) -> Sample:
        return self.parts[0].empty()

    def prompt(self, number: int, tokens: int) -> np.ndarray:
        """From each part in turn, so that generated samples show all of them."""
        return self.parts[number % len(self.parts)].prompt(number // len(self.parts), tokens)

    def _part(self, number: int) -> Samples:
        return self.parts[bisect_right(self._ends, number)]

    def _place(self, number: int) -> int:
        which = bisect_right(self._ends, number)
        return number - (self._ends[which - 1] if which else 0)


def _too_little(stream: TokenStream, seq: int, packing: bool) -> BadInput:
    needed = f"a sample takes {seq + 1}" if packing else "a document needs at least 2"
    if stream.name == "heldout":
        fix = "raise data.heldout, lower recipe.seq, or give more data"
    else:
        fix = "lower recipe.seq or give more data"
    documents = len(stream.document_ends)
    return BadInput(
        f"the {stream.name} data has {len(stream)} tokens in {documents} documents, but {needed}", fix
    )


AnySamples = Samples | JoinedSamples


class CutSamples(NamedTuple):
    """All samples of a run."""

    parts: tuple[Samples, ...]  # training samples of each part of a mix
    validation: dict[str, AnySamples]

    @property
    def train(self) -> AnySamples:
        return _joined(self.parts)


def cut_samples(collection: Collection, data: DataSection, seq: int, pad: int) -> CutSamples:
    """Training samples, and those of every validation set that is long enough to have any."""
    cut: Callable[[TokenStream], Samples]
    cut = partial(Samples, seq=seq, packing=data.packing, within_documents=data.within_documents, pad=pad)
    if any(dataset.pairs for dataset in collection.everything):
        cut = partial(PairSamples, seq=seq, pad=pad, most_left_out=data.max_bad_rows)
        if not all(dataset.pairs for dataset in collection.everything):
            raise BadInput("some of the data is pairs and some is not", "one data.format for all of it")
    for dataset in collection.everything:
        dataset.check_documents()
    held = [sample for part in collection.parts if (sample := _if_any(cut, part.heldout)) is not None]
    validation: dict[str, AnySamples] = {HELDOUT: _joined(held)} if held else {}
    for name, dataset in collection.validation.items():
        # All of it is for validation: a dataset made for that has nothing held out.
        validation[name] = cut(dataset.train)
    return CutSamples(tuple(cut(part.train) for part in collection.parts), validation)


def _joined(parts: Sequence[Samples]) -> AnySamples:
    return parts[0] if len(parts) == 1 else JoinedSamples(parts)


def _if_any(cut: Callable[[TokenStream], Samples], stream: TokenStream) -> Samples | None:
    try:
        return cut(stream)
    except BadInput:
        return None
