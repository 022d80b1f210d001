"""Mixes: shares that are kept in every stretch, each part in an order of its own, nothing left out."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.train.data.mixed_order import MixedOrder, MixPhase
from shoal.train.data.order import GlobalOrder

weights = st.lists(st.fractions(0, 5), min_size=1, max_size=5).filter(any)


@given(weights, st.integers(0, 400), st.integers(1, 300))
def test_every_stretch_has_the_shares_that_were_asked_for(shares, first, length):
    phase = MixPhase(0, tuple(shares))
    before, after = phase.counts(first), phase.counts(first + length)
    assert sum(before) == first and sum(after) == first + length
    for share, had, has in zip(shares, before, after, strict=True):
        assert has - had >= 0
        # One sample a part that is decided before it.
        assert abs(has - had - length * share / sum(shares)) <= len(shares)
        assert share or has == 0


@settings(max_examples=40)  # each looks at 150 samples one by one
@given(weights, weights, st.integers(0, 90), st.integers(0, 5))
def test_each_part_gives_its_samples_one_after_another_over_all_phases(one, other, change, seed):
    size = min(len(one), len(other))
    one, other = one[:size], other[:size]
    if not (any(one) and any(other)):
        return
    sizes = [7 + 2 * number for number in range(size)]
    phases = (
        [MixPhase(0, tuple(one)), MixPhase(change, tuple(other))] if change else [MixPhase(0, tuple(one))]
    )
    order = MixedOrder([GlobalOrder(seed + part, size) for part, size in enumerate(sizes)], sizes, phases)
    next_of = Counter()
    for number in range(150):
        part, place = order.turn(number)
        assert place == next_of[part]
        next_of[part] += 1
    # As many at once as one by one, and each part's own epochs.
    found = order.indices(np.arange(150, dtype=np.uint64))
    assert found.tolist() == [int(order.indices(np.array([number]))[0]) for number in range(150)]
    start = 0
    for size in sizes:
        mine = [index for index in found.tolist() if start <= index < start + size]
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(start, start + size))
        start += size


def test_weights_change_at_the_sample_that_is_said():
    order = MixedOrder(
        [GlobalOrder(0, 50), GlobalOrder(1, 50)],
        [50, 50],
        [MixPhase(0, (Fraction(3), Fraction(1))), MixPhase(40, (Fraction(0), Fraction(1)))],
    )
    turns = [order.turn(number)[0] for number in range(80)]
    assert Counter(turns[:40]) == {0: 30, 1: 10}
    assert Counter(turns[40:]) == {1: 40}


@pytest.mark.parametrize("weight", ["0.1", "0.3", "1e-3"])
def test_decimal_weights_are_exact(weight):
    phase = MixPhase(0, (Fraction(weight), 1 - Fraction(weight)))
    assert phase.counts(10**15)[0] == Fraction(weight) * 10**15
