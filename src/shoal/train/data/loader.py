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

# The order of samples is computed for several steps at a time: a few long arrays, not many short ones.
INDICES_AT_ONCE = 4096


@dataclass(frozen=True)
class Batch:
    """Some rows of a global batch."""

    tokens: torch.Tensor  # int64 [rows, seq]
    targets: torch.Tensor  # int64 [rows, seq], IGNORE where there is nothing to predict
    # int64 [rows, seq], always 0 to seq - 1: the place in the row, which rotary angles and the random numbers
    # of dropout follow from. It never restarts at a document: two tokens of a row would then share their
    # dropout, and rotary attention, which sees differences of positions only, would gain nothing.
    positions: torch.Tensor
    documents: Documents | None  # where attention stays within them
    rows: torch.Tensor  # int64 [rows]: each row's position in the global batch
    # What the loss is a sum over, targets or pairs; counted here, on the CPU, so that no caller waits for a device.
    count: int
    samples: tuple[int, ...] = ()  # which of all samples the rows are
    # float64 [rows]: what a loss with a reference compares each row's log-probability with; NaN: the row counts not.
    reference: torch.Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """With what a device computes with there; ``rows`` stays where reading it waits for no device."""
        return replace(
            self,
            tokens=to_device(self.tokens, device),
            targets=to_device(self.targets, device),
            positions=to_device(self.positions, device),
            documents=None if self.documents is None else self.documents.to(device),
            reference=None if self.reference is None else to_device(self.reference, device),
        )


class Loader:
    """Training samples in their order, and validation samples, where there are any, as they come."""

    def __init__(
        self,
        samples: AnySamples,
        order: SampleOrder,
        clock: SampleClock,
        heldout: AnySamples | None = None,
        validation: Mapping[str, AnySamples] | None = None,
    ) -> None:
        """``heldout``: the validation set that the run is judged by; ``validation``: all of them."""
        self.samples, self.order, self.clock, self.heldout = samples, order, clock, heldout
        self.validation = dict(validation or {})

    @property
    def heldout_count(self) -> int:
        return 0 if self.heldout is None else len(self.heldout)

    def rows(self, step: int, positions: Sequence[int]) -> Batch:
        """The rows at these positions of the global batch of a step (steps start at 1)."""
        (indices,) = self._indices([step], [positions])
        return self._rows(indices, positions)

    def used(self, step: int) -> list[int]:
        """Every sample of a step, in the order of the global batch."""
        (indices,) = self._indices([step], [range(self.clock.at(step))])
        return [int(index) for index in indices]

    def used_in(self, first: int, last: int) -> list[int]:
        """Every sample of these steps, once."""
        before, after = self.clock.before(first), self.clock.before(last + 1)
        if after - before >= len(self.samples):
            return list(range(len(self.samples)))  # an epoch has them all
        numbers = np.arange(before, after, dtype=np.uint64)
        return np.unique(self.order.indices(numbers)).tolist()

    def _indices(self, steps: Sequence[int], places: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Which sample is at each of a step's places, for each of these steps."""
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
        """Rows of the validation set that the run is judged by."""
        if self.heldout is None:
            raise ValueError("there are no held-out samples")
        return validation_rows(self.heldout, positions)

    def heldout_prompt(self, number: int, tokens: int) -> torch.Tensor:
        """What a text to generate begins with, of so many tokens, or a conversation up to its first answer."""
        if self.heldout is None:
            raise ValueError("there are no held-out samples")
        return torch.from_numpy(self.heldout.prompt(number, tokens))

    def steps(
        self, first: int, last: int, positions: Callable[[int], Sequence[Sequence[int]]]
    ) -> Generator[tuple[int, list[Batch]]]:
        """Each step from ``first`` to ``last`` with its micro-batches, which a thread prepares ahead.

        ``positions`` of a step: those of the global batch that are wanted, a group for each micro-batch.
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
    """The samples with these numbers. Past the last one, a row is empty: it has no targets.

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
