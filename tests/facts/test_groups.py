"""Buckets: every parameter once, last layer first, and none larger than it may be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.groups import buckets

SIZES = st.lists(st.integers(0, 50)).map(
    lambda sizes: [(f"parameter{place}", size) for place, size in enumerate(sizes)]
)


@given(SIZES, st.integers(0, 100))
def test_every_parameter_once_from_last_to_first(sizes: list[tuple[str, int]], limit: int) -> None:
    flat = [name for bucket in buckets(sizes, limit) for name in bucket]
    assert flat == [name for name, _ in reversed(sizes)]


@given(SIZES, st.integers(0, 100))
def test_a_bucket_keeps_its_limit_unless_one_parameter_breaks_it(
    sizes: list[tuple[str, int]], limit: int
) -> None:
    size = dict(sizes)
    for bucket in buckets(sizes, limit):
        assert bucket
        assert sum(map(size.__getitem__, bucket)) <= limit or len(bucket) == 1


@given(SIZES, st.integers(0, 100))
def test_a_bucket_closes_only_when_it_must(sizes: list[tuple[str, int]], limit: int) -> None:
    size = dict(sizes)
    cut = buckets(sizes, limit)
    for bucket, following in pairwise(cut):
        assert sum(map(size.__getitem__, bucket)) + size[following[0]] > limit


def test_by_hand() -> None:
    sizes = iter([("embedding", 90), ("one", 4), ("two", 5), ("head", 1)])
    assert buckets(sizes, 10) == [["head", "two", "one"], ["embedding"]]
    assert buckets([], 10) == []
