"""The loader: batches depend on step and position alone; prefetching changes nothing and ends cleanly."""

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from shoal.facts.sample_clock import SampleClock
from shoal.facts.targets import IGNORE
from shoal.train.data.dataset import TokenStream
from shoal.train.data.loader import Batch, Loader
from shoal.train.data.order import GlobalOrder, sample_index
from shoal.train.data.samples import Samples


def make_samples(count, within_documents=False):
    total = count * 4 + 1
    ends = np.array([*range(3, total, 3), total])
    stream = TokenStream("train", [np.arange(total)], ends)
    return Samples(stream, 4, packing=True, within_documents=within_documents, pad=0)


def make(count=10, within_documents=False, heldout=None):
    samples = make_samples(count, within_documents)
    return Loader(samples, GlobalOrder(5, len(samples)), SampleClock(6), heldout=heldout)


def same(one: Batch, other: Batch) -> bool:
    pairs = [
        (getattr(one, name), getattr(other, name)) for name in ("tokens", "targets", "positions", "rows")
    ]
    if one.documents is not None or other.documents is not None:
        pairs.append((one.documents.ends, other.documents.ends))
    return one.count == other.count and all(torch.equal(left, right) for left, right in pairs)


def lengths(batch: Batch) -> list[list[int]]:
    """Of every row's documents."""
    rows, seq = batch.tokens.shape
    ends = batch.documents.ends[: int(batch.documents.sizes[0]) + 1].tolist()
    return [
        [stop - start for start, stop in pairwise(ends) if row * seq <= start < (row + 1) * seq]
        for row in range(rows)
    ]


def test_rows_follow_the_order_of_the_seed():
    loader = make()
    for step in (1, 2, 3, 1000):
        batch = loader.rows(step, range(6))
        expected = [sample_index(5, (step - 1) * 6 + position, 10) for position in range(6)]
        assert (batch.tokens[:, 0] // 4).tolist() == expected
        assert batch.rows.tolist() == list(range(6))


def test_any_division_of_the_batch_holds_the_same_rows():
    loader = make(within_documents=True)
    whole = loader.rows(3, range(6))
    parts = [loader.rows(3, positions) for positions in ([0, 3], [5], [4, 1, 2])]
    assert whole.documents is not None
    for part in parts:
        for name in ("tokens", "targets", "positions"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[part.rows])
        assert lengths(part) == [lengths(whole)[row] for row in part.rows]
    assert sum(part.count for part in parts) == whole.count == int((whole.targets != IGNORE).sum())


def test_positions_never_restart_and_documents_come_only_when_asked():
    assert make().rows(1, [0]).documents is None
    batch = make(within_documents=True).rows(1, [0, 1])
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert all(sum(row) == 4 for row in lengths(batch)) and any(len(row) > 1 for row in lengths(batch))
    assert batch.count < batch.targets.numel()


def test_positions_outside_the_batch_are_a_mistake():
    for step, positions in ((0, [0]), (1, [6]), (1, [-1])):
        with pytest.raises(ValueError, match="of a batch of 6"):
            make().rows(step, positions)


def test_heldout_rows_come_in_order_and_end_in_empty_rows():
    loader = make(heldout=make_samples(3))
    assert loader.heldout_count == 3 and make().heldout_count == 0
    batch = loader.heldout_rows(range(1, 5))
    assert (batch.tokens[:2, 0] // 4).tolist() == [1, 2]
    assert (batch.targets[2:] == IGNORE).all()
    assert batch.count == 8
    assert batch.rows.tolist() == [1, 2, 3, 4]


def test_prefetched_steps_equal_direct_calls():
    loader = make(within_documents=True)
    groups = [[0, 2], [4]]
    got = list(loader.steps(2, 9, lambda step: groups))
    assert [step for step, _ in got] == list(range(2, 10))
    for step, batches in got:
        assert len(batches) == 2
        for batch, positions in zip(batches, groups, strict=True):
            assert same(batch, loader.rows(step, positions))


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "shoal-loader"]


def test_stopping_early_ends_the_thread():
    steps = make().steps(1, 1_000_000, lambda step: [[0]])
    next(steps)
    assert loader_threads()
    steps.close()
    assert not loader_threads()


def test_an_error_in_the_thread_reaches_the_consumer():
    steps = make().steps(1, 5, lambda step: [[0], [99]])
    with pytest.raises(ValueError, match="of a batch of 6"):
        next(steps)
    assert not loader_threads()


def test_to_moves_what_is_computed_with_and_keeps_the_count():
    batch = make(within_documents=True).rows(1, [0]).to(torch.device("meta"))
    assert batch.count > 0 and batch.documents is not None
    assert {part.device.type for part in (batch.tokens, batch.targets, batch.positions)} == {"meta"}
    # Places in the batch, and how many documents there are, are read on the host.
    assert batch.rows.device.type == "cpu"
    assert batch.documents.ends.device.type == "meta" and batch.documents.sizes.device.type == "cpu"
