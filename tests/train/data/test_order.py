"""The order of samples is a permutation every epoch, and depends on nothing but seed and number."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.train.data.order import sample_index, sample_indices

seeds = st.integers(min_value=-(2**70), max_value=2**70)


@given(seed=seeds, epoch=st.integers(0, 2**30), count=st.integers(1, 3000))
@settings(max_examples=60)
def test_every_epoch_uses_every_sample_once(seed, epoch, count):
    numbers = np.arange(epoch * count, (epoch + 1) * count, dtype=np.uint64)
    assert sorted(sample_indices(seed, numbers, count).tolist()) == list(range(count))


@given(seed=seeds, numbers=st.lists(st.integers(0, 2**64 - 1), min_size=1), count=st.integers(1, 2**64 - 1))
@settings(max_examples=200)
def test_many_at_once_equal_one_by_one(seed, numbers, count):
    one_by_one = [sample_index(seed, number, count) for number in numbers]
    assert sample_indices(seed, np.array(numbers, dtype=np.uint64), count).tolist() == one_by_one
    assert all(0 <= index < count for index in one_by_one)


def test_epochs_and_seeds_differ():
    count = 1000
    orders = {
        tuple(sample_indices(seed, np.arange(epoch * count, (epoch + 1) * count), count).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_small_ranges_reach_every_order_about_equally_often():
    epochs = 6000
    orders = sample_indices(7, np.arange(3 * epochs), 3).reshape(epochs, 3)
    often = Counter(map(tuple, orders.tolist()))
    assert len(often) == 6
    assert all(850 < times < 1150 for times in often.values())


def test_first_place_is_spread_over_all_samples():
    count, epochs = 50, 10_000
    first = sample_indices(3, np.arange(epochs) * count, count)
    times = np.bincount(first.astype(np.int64), minlength=count)
    assert times.min() > 130 and times.max() < 275  # 200 expected, standard deviation 14


def test_the_order_is_what_it_always_was():
    # A change here breaks the resume of every run ever started.
    assert [sample_index(1234, number, 10) for number in range(20)] == [
        8,
        1,
        9,
        0,
        4,
        5,
        2,
        7,
        6,
        3,
        1,
        5,
        0,
        4,
        6,
        7,
        8,
        2,
        3,
        9,
    ]
