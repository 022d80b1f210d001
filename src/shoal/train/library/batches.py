"""Batches of the user's data: which rows belong to this rank, in an order that no layout changes.

A loader's ``batch_size`` is the step's batch over all ranks, as in a single-process script. Each rank reads only its
own rows of it. A step's rows are a function of the seed and the step, so a resume can start in the middle of an epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from shoal.facts.problem import BadInput
from shoal.train.data.order import sample_indices

OWN_ORDER = "pass the dataset and shuffle=True, or call run.step with batches of your own"


@dataclass(frozen=True)
class Share:
    """Which of the data ranks this is; ``batch`` is the number of rows per step over all of them."""

    rank: int
    ranks: int
    batch: int
    seed: int

    def places(self, batch: int) -> range:
        """This rank's rows in a step's batch, as indices."""
        each = batch // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)


class StepLoader:
    """One pass is an epoch: one batch per step, of which every rank gets its share."""

    def __init__(
        self, data: Any, share: Share, shuffle: bool, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self.share, self.shuffle = share, shuffle
        self.options: dict[str, Any] = {}
        self.collate: Callable[[list[Any]], Any] = collate or collate_rows
        self.drop_last = False
        self.data = data
        self.streamed = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
        if not self.streamed and not hasattr(data, "__len__"):
            raise BadInput(f"{type(data).__name__} has no length", "a dataset with __len__, or an iterable")
        if self.streamed and shuffle:
            raise BadInput(
                "a stream cannot be shuffled here", "shuffle it where it is made, the same on every rank"
            )
        self.epoch = 0  # of the next pass
        self.done = 0  # steps done before this process began

    @classmethod
    def of(cls, loader: DataLoader[Any], share: Share) -> StepLoader:
        """Wrap a DataLoader: same data, collation and number of workers."""
        sampler = loader.sampler
        plain = isinstance(sampler, SequentialSampler) or isinstance(loader.dataset, IterableDataset)
        shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement
        if not (plain or shuffled) or loader.batch_size is None:
            raise BadInput(f"the loader has a sampler of its own ({type(sampler).__name__})", OWN_ORDER)
        found = cls(loader.dataset, share, shuffled, loader.collate_fn)
        found.drop_last = loader.drop_last
        found.options = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
        }
        if loader.num_workers:
            found.options["prefetch_factor"] = loader.prefetch_factor
        return found

    def __len__(self) -> int:
        """Steps per epoch."""
        if self.streamed:
            raise TypeError("a stream has no length")
        whole, rest = divmod(len(self.data), self.share.batch)
        return whole + int(self._keeps(rest))

    @property
    def dropped(self) -> int:
        """Rows dropped at the end of an epoch, because there are too few for all ranks to have equally many."""
        if self.streamed:
            return 0
        rest = len(self.data) % self.share.batch
        return 0 if self._keeps(rest) else rest

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if self.streamed:
            yield from self._stream()
            return
        first = max(0, self.done - epoch * len(self))
        rows = [self._rows(epoch, step) for step in range(first, len(self))]
        if rows:
            yield from DataLoader(self.data, batch_sampler=rows, collate_fn=self.collate, **self.options)

    def _keeps(self, rest: int) -> bool:
        return rest > 0 and rest % self.share.ranks == 0 and not self.drop_last

    def _rows(self, epoch: int, step: int) -> list[int]:
        total, batch = len(self.data), self.share.batch
        size = min(batch, total - step * batch)
        numbers = np.asarray([step * batch + place for place in self.share.places(size)], dtype=np.uint64)
        if not self.shuffle:
            return [int(number) for number in numbers]
        return [
            int(one) for one in sample_indices(self.share.seed, numbers + np.uint64(epoch * total), total)
        ]

    def _stream(self) -> Iterator[Any]:
        """Every rank reads the whole stream and keeps its own rows; rows used before a resume are read again."""
        rows = iter(self.data)
        places, skipped = self.share.places(self.share.batch), self.done
        while len(here := list(islice(rows, self.share.batch))) == self.share.batch:
            if skipped:
                skipped -= 1
                continue
            yield self.collate([here[place] for place in places])
        self.done = 0


def collate_rows(rows: list[Any]) -> Any:
    """Collate as torch does, except that a row's list of numbers, as in ``datasets``, becomes a tensor."""
    return default_collate([_as_tensors(row) for row in rows])


def _as_tensors(row: Any) -> Any:
    if isinstance(row, Mapping):
        return {key: _as_tensors(value) for key, value in row.items()}
    is_numbers = isinstance(row, list) and bool(row) and all(isinstance(one, int | float) for one in row)
    return torch.tensor(row) if is_numbers else row


def rows_of(batch: Any) -> int:
    """The number of rows in a collated batch: the length of its tensors."""
    found = next((one for one in _leaves(batch) if isinstance(one, Tensor) and one.dim()), None)
    if found is None:
        raise BadInput(
            "a batch has no tensor with rows", "tensors in a dict or a tuple, their first dimension the rows"
        )
    return int(found.shape[0])


def micro_batches(batch: Any, micro: int | None) -> list[Any]:
    """Split a batch into parts of ``micro`` rows; None: no split."""
    rows = rows_of(batch)
    if micro is None or micro >= rows:
        return [batch]
    return [_part(batch, rows, slice(start, start + micro)) for start in range(0, rows, micro)]


def to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return _mapped(batch, lambda one: to_device(one, device))


def _part(batch: Any, rows: int, where: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[where] if batch.dim() and batch.shape[0] == rows else batch
    if isinstance(batch, list) and len(batch) == rows and not any(isinstance(one, Tensor) for one in batch):
        return batch[where]
    return _mapped(batch, lambda one: _part(one, rows, where))


def _mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Mapping):
        changed = {key: change(value) for key, value in batch.items()}
        if isinstance(batch, dict) and type(batch) is not dict:
            same = copy.copy(batch)
            same.update(changed)
            return same
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(change, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(change, batch))
    return batch


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for one in batch.values():
            yield from _leaves(one)
    elif isinstance(batch, tuple | list):
        for one in batch:
            yield from _leaves(one)
    else:
        yield batch
