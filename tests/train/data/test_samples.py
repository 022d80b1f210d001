"""Samples: every token is a target as often as it should be, and documents stay apart where asked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.facts.problem import BadInput
from shoal.facts.targets import IGNORE
from shoal.train.data.dataset import TokenStream
from shoal.train.data.samples import Samples

PAD = 999_999
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def make(document_lengths, seq, *, packing, within_documents=False):
    """A stream whose tokens are their own offsets."""
    ends = np.cumsum(document_lengths)
    stream = TokenStream("train", [np.arange(ends[-1])], ends)
    return Samples(stream, seq, packing=packing, within_documents=within_documents, pad=PAD)


def test_packed_rows_in_full():
    first, second = make([3, 2, 4], 4, packing=True)
    assert first.tokens.tolist() == [0, 1, 2, 3]
    assert first.targets.tolist() == [1, 2, 3, 4]
    assert first.documents.tolist() == [0, 0, 0, 1]
    assert second.tokens.tolist() == [4, 5, 6, 7]
    assert second.targets.tolist() == [5, 6, 7, 8]
    assert second.documents.tolist() == [0, 1, 1, 1]


def test_packed_rows_within_documents():
    first, second = make([3, 2, 4], 4, packing=True, within_documents=True)
    assert first.targets.tolist() == [1, 2, IGNORE, 4]
    assert second.targets.tolist() == [IGNORE, 6, 7, 8]


def test_unpacked_rows_in_full():
    samples = list(make([3, 1, 6], 4, packing=False))
    assert [sample.tokens.tolist() for sample in samples] == [
        [0, 1, PAD, PAD],
        [4, 5, 6, 7],
        [8, PAD, PAD, PAD],
    ]
    assert [sample.targets.tolist() for sample in samples] == [
        [1, 2, IGNORE, IGNORE],
        [5, 6, 7, 8],
        [9, IGNORE, IGNORE, IGNORE],
    ]
    assert [sample.documents.tolist() for sample in samples] == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]]


@given(document_lengths=lengths, seq=st.integers(1, 30))
@settings(max_examples=80)
def test_packed_targets_are_every_token_but_the_first_once(document_lengths, seq):
    total = sum(document_lengths)
    if total <= seq:
        with pytest.raises(BadInput):
            make(document_lengths, seq, packing=True)
        return
    samples = make(document_lengths, seq, packing=True)
    targets = np.concatenate([sample.targets for sample in samples])
    assert targets.tolist() == list(range(1, len(samples) * seq + 1))
    assert total - 1 - len(targets) < seq  # no whole sample is left out
    of_token = np.repeat(np.arange(len(document_lengths)), document_lengths)
    for sample in samples:
        assert (sample.documents == of_token[sample.tokens] - of_token[sample.tokens[0]]).all()

    starts = set(np.cumsum(document_lengths).tolist())
    inside = make(document_lengths, seq, packing=True, within_documents=True)
    kept = np.concatenate([sample.targets for sample in inside])
    assert kept.tolist() == [IGNORE if target in starts else target for target in targets.tolist()]


@given(document_lengths=lengths, seq=st.integers(1, 30))
@settings(max_examples=80)
def test_unpacked_targets_are_every_token_but_each_documents_first_once(document_lengths, seq):
    if max(document_lengths) == 1:
        with pytest.raises(BadInput):
            make(document_lengths, seq, packing=False)
        return
    samples = make(document_lengths, seq, packing=False)
    targets = np.concatenate([sample.targets for sample in samples])
    tokens = np.concatenate([sample.tokens for sample in samples])
    kept = targets != IGNORE
    starts = {0, *np.cumsum(document_lengths).tolist()}
    assert targets[kept].tolist() == [token for token in range(sum(document_lengths)) if token not in starts]
    assert (tokens[kept] + 1 == targets[kept]).all()
    assert (tokens[~kept] == PAD).all()


def test_arrays_are_int64_and_numbers_are_checked():
    for packing in (True, False):
        samples = make([30], 7, packing=packing)
        assert all(part.dtype == np.int64 and part.shape == (7,) for part in samples[0][:3])
        for number in (-1, len(samples)):
            with pytest.raises(IndexError):
                samples[number]


def test_too_little_data_is_said_in_numbers():
    with pytest.raises(BadInput, match="has 8 tokens in 2 documents, but a sample takes 9"):
        make([4, 4], 8, packing=True)
    stream = TokenStream("heldout", [], np.empty(0, dtype=np.int64))
    for packing in (True, False):
        with pytest.raises(BadInput, match=r"has 0 tokens(.|\n)*data\.heldout"):
            Samples(stream, 8, packing=packing, within_documents=False, pad=0)
