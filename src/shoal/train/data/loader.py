"""The loader: a batch depends only on the step and the positions in it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from shoal.facts.sample_clock import SampleClock
from shoal.models.device_copy import to_device
from shoal.models.documents import Documents
from shoal.train.data.order import SampleOrder
from shoal.train.data.samples import AnySamples, Sample

STEPS_AHEAD = 2

# Compute the order of samples for several steps at a time: a few long arrays are faster than many short ones.
INDICES_AT_ONCE = 4096


@dataclass(frozen=True)
class Batch:
    """Some rows of a global batch."""

    tokens: torch.Tensor  # int64 [rows, seq]
    targets: torch.Tensor  # int64 [rows, seq], IGNORE if there is no target
    # int64 [rows, seq], always 0 to seq - 1: the position in the row, which rotary angles and dropout's random numbers
    # use. It never restarts at a document: two tokens of a row would then share their dropout, and rotary attention,
    # which depends only on differences of positions, would gain nothing.
    positions: torch.Tensor
    documents: Documents | None  # set if attention stays within documents
    rows: torch.Tensor  # int64 [rows]: each row's position in the global batch
    # What the loss is a sum over, targets or pairs; counted here on the CPU, so that no caller synchronises with a
    # device.
    count: int
    samples: tuple[int, ...] = ()  # the index of each row's sample
    # float64 [rows]: what a loss with a reference compares each row's log-probability with; NaN: ignore the row.
    reference: torch.Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Move what a device computes with; ``rows`` stays where reading it does not synchronise."""
        return replace(
            self,
            tokens=to_device(self.tokens, device),
            targets=to_device(self.targets, device),
            positions=to_device(self.positions, device),
            documents=None if self.documents is None else self.documents.to(device),
            reference=None if self.reference is None else to_device(self.reference, device),
        )


class Loader:
    """Training samples in their order, and validation samples, if any, in their stored order."""

    def __init__(
        self,
        samples: AnySamples,
        order: SampleOrder,
        clock: SampleClock,
        heldout: AnySamples | None = None,
        validation: Mapping[str, AnySamples] | None = None,
    ) -> None:
        """``heldout``: the validation set that judges the run; ``validation``: all of them."""
        self.samples, self.order, self.clock, self.heldout = samples, order, clock, heldout
        self.validation = dict(validation or {})

    @property
    def heldout_count(self) -> int:
        return 0 if self.heldout is None else len(self.heldout)

    def rows(self, step: int, positions: Sequence[int]) -> Batch:
        """The rows at these positions of a step's global batch (steps start at 1)."""
        (indices,) = self._indices([step], [positions])
        return self._rows(indices, positions)

    def used(self, step: int) -> list[int]:
        """Indices of a step's samples, in the order of the global batch."""
        (indices,) = self._indices([step], [range(self.clock.at(step))])
        return [int(index) for index in indices]

    def used_in(self, first: int, last: int) -> list[int]:
        """Indices of all samples of these steps, without repeats."""
        before, after = self.clock.before(first), self.clock.before(last + 1)
        if after - before >= len(self.samples):
            return list(range(len(self.samples)))  # an epoch uses all of them
        numbers = np.arange(before, after, dtype=np.uint64)
        return np.unique(self.order.indices(numbers)).tolist()

    def _indices(self, steps: Sequence[int], places: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """For each step, the index of the sample at each position."""
        numbers = []
        for step, mine in zip(steps, places, strict=True):
            if step < 1 or not all(0 <= position < self.clock.at(step) for position in mine):
                raise ValueError(f"step {step}, positions {list(mine)} of a batch of {self.clock.at(step)}")
            numbers.append(np.uint64(self.clock.before(step)) + np.array(mine, dtype=np.uint64))
        indices = self.order.indices(np.concatenate(numbers))
        return np.split(indices, list(accumulate(map(len, numbers)))[:-1])

    def _rows(self, indices: np.ndarray, positions: Sequence[int]) -> Batch:
        chosen = tuple(int(index) for index in indices)
        return replace(
            _collate(self.samples, [self.samples[one] for one in chosen], positions), samples=chosen
        )

    def heldout_rows(self, positions: Sequence[int]) -> Batch:
        """Rows of the validation set that judges the run."""
        if self.heldout is None:
            raise ValueError("there are no held-out samples")
        return validation_rows(self.heldout, positions)

    def heldout_prompt(self, number: int, tokens: int) -> torch.Tensor:
        """A prompt for generating text: the first ``tokens`` tokens of a text, or a conversation up to its first
        answer.
        """
        if self.heldout is None:
            raise ValueError("there are no held-out samples")
        return torch.from_numpy(self.heldout.prompt(number, tokens))

    def steps(
        self, first: int, last: int, positions: Callable[[int], Sequence[Sequence[int]]]
    ) -> Generator[tuple[int, list[Batch]]]:
        """Each step from ``first`` to ``last`` with its micro-batches, prefetched by a thread.

        ``positions`` returns a step's wanted positions of the global batch, grouped by micro-batch.
        """
        ready: queue.Queue[tuple[int, list[Batch]] | BaseException | None] = queue.Queue(STEPS_AHEAD)
        stopped = threading.Event()

        def offer(item: tuple[int, list[Batch]] | BaseException | None) -> bool:
            while not stopped.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def batches() -> Iterator[tuple[int, list[Batch]]]:
            at_once = max(1, INDICES_AT_ONCE // max(1, sum(map(len, positions(last)))))
            for start in range(first, last + 1, at_once):
                block = range(start, min(start + at_once, last + 1))
                groups = [positions(step) for step in block]
                places = [[place for group in each for place in group] for each in groups]
                for step, each, indices in zip(block, groups, self._indices(block, places), strict=True):
                    ends = accumulate(map(len, each), initial=0)
                    parts = [indices[begin:end] for begin, end in pairwise(ends)]
                    yield step, [self._rows(*pair) for pair in zip(parts, each, strict=True)]

        def work() -> None:
            try:
                for batch in batches():
                    if not offer(batch):
                        return
                offer(None)
            except BaseException as error:
                offer(error)

        thread = threading.Thread(target=work, name="shoal-loader", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            thread.join()


def validation_rows(samples: AnySamples, positions: Sequence[int]) -> Batch:
    """The samples with these indices. Rows past the last sample are empty: they have no targets.

    So every rank can run equally many rows, and each sample still counts once.
    """
    chosen = [samples[position] if position < len(samples) else samples.empty() for position in positions]
    return _collate(samples, chosen, positions)


def _collate(source: AnySamples, samples: Sequence[Sample], positions: Sequence[int]) -> Batch:
    targets = np.stack([sample.targets for sample in samples])
    documents = None
    if source.within_documents:
        documents = Documents.of(torch.from_numpy(np.stack([sample.documents for sample in samples])))
    reference = None
    if source.together > 1:
        reference = torch.tensor([sample.reference for sample in samples], dtype=torch.float64)
    return Batch(
        tokens=torch.from_numpy(np.stack([sample.tokens for sample in samples])),
        targets=torch.from_numpy(targets),
        positions=torch.arange(source.seq).repeat(len(samples), 1),
        documents=documents,
        rows=torch.tensor(list(positions), dtype=torch.int64),
        count=source.counted(targets),
        reference=reference,
    )
