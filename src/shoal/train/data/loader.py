"""The loader: a batch depends only on the step and the positions in it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from shoal.facts.targets import IGNORE
from shoal.models.device_copy import to_device
from shoal.models.documents import Documents
from shoal.train.data.order import sample_indices
from shoal.train.data.samples import Sample, Samples

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
    count: int  # targets to predict; counted here, on the CPU, so that no caller waits for a device
    samples: tuple[int, ...] = ()  # which of all samples the rows are

    def to(self, device: torch.device) -> Batch:
        """With what a device computes with there; ``rows`` stays where reading it waits for no device."""
        return replace(
            self,
            tokens=to_device(self.tokens, device),
            targets=to_device(self.targets, device),
            positions=to_device(self.positions, device),
            documents=None if self.documents is None else self.documents.to(device),
        )


class Loader:
    """Training samples in the order of the seed, and held-out samples, where there are any, as they come."""

    def __init__(self, samples: Samples, seed: int, batch: int, heldout: Samples | None = None) -> None:
        self.samples, self.seed, self.batch, self.heldout = samples, seed, batch, heldout

    @property
    def heldout_count(self) -> int:
        return 0 if self.heldout is None else len(self.heldout)

    def rows(self, step: int, positions: Sequence[int]) -> Batch:
        """The rows at these positions of the global batch of a step (steps start at 1)."""
        (indices,) = self._indices([step], positions)
        return self._rows(indices, positions)

    def _indices(self, steps: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """Which sample is at each position of each of these steps: [steps, positions]."""
        if min(steps) < 1 or not all(0 <= position < self.batch for position in positions):
            raise ValueError(f"steps {list(steps)}, positions {list(positions)} of a batch of {self.batch}")
        starts = (np.array(steps, dtype=np.uint64) - np.uint64(1)) * np.uint64(self.batch)
        numbers = starts[:, None] + np.array(positions, dtype=np.uint64)
        indices = sample_indices(self.seed, numbers.reshape(-1), len(self.samples))
        return indices.reshape(numbers.shape)

    def _rows(self, indices: np.ndarray, positions: Sequence[int]) -> Batch:
        chosen = tuple(int(index) for index in indices)
        return replace(
            _collate(self.samples, [self.samples[one] for one in chosen], positions), samples=chosen
        )

    def heldout_rows(self, positions: Sequence[int]) -> Batch:
        """The held-out samples with these numbers. Past the last one, a row is empty: it has no targets.

        So every rank can run equally many rows, and each sample still counts once.
        """
        if self.heldout is None:
            raise ValueError("there are no held-out samples")
        samples = [
            self.heldout[position] if position < len(self.heldout) else self.heldout.empty()
            for position in positions
        ]
        return _collate(self.heldout, samples, positions)

    def heldout_prompt(self, number: int, tokens: int) -> torch.Tensor:
        """What a text to generate begins with, of so many tokens, or a conversation up to its first answer."""
        if self.heldout is None:
            raise ValueError("there are no held-out samples")
        return torch.from_numpy(self.heldout.prompt(number, tokens))

    def steps(
        self, first: int, last: int, position_groups: Sequence[Sequence[int]]
    ) -> Generator[tuple[int, list[Batch]]]:
        """Each step from ``first`` to ``last`` with its micro-batches, which a thread prepares ahead."""
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
            places = [position for positions in position_groups for position in positions]
            ends = list(accumulate(map(len, position_groups), initial=0))
            at_once = max(1, INDICES_AT_ONCE // max(1, len(places)))
            for start in range(first, last + 1, at_once):
                block = range(start, min(start + at_once, last + 1))
                for step, indices in zip(block, self._indices(block, places), strict=True):
                    parts = [indices[begin:end] for begin, end in pairwise(ends)]
                    yield step, [self._rows(*pair) for pair in zip(parts, position_groups, strict=True)]

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


def _collate(source: Samples, samples: Sequence[Sample], positions: Sequence[int]) -> Batch:
    targets = np.stack([sample.targets for sample in samples])
    documents = None
    if source.within_documents:
        documents = Documents.of(torch.from_numpy(np.stack([sample.documents for sample in samples])))
    return Batch(
        tokens=torch.from_numpy(np.stack([sample.tokens for sample in samples])),
        targets=torch.from_numpy(targets),
        positions=torch.arange(source.seq).repeat(len(samples), 1),
        documents=documents,
        rows=torch.tensor(list(positions), dtype=torch.int64),
        count=int((targets != IGNORE).sum()),
    )
