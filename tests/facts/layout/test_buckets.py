"""Buckets: every parameter once, last layer first, and none larger than it may be. Units: what is gathered at once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.layout.buckets import Unit, buckets, buckets_by_kind, even_share, flat_kind, units

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


# Units and flat buckets of sharded parameters.

PARAMETERS = st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab"))).map(
    lambda drawn: [(f"parameter{place}", size, kind) for place, (size, kind) in enumerate(drawn)]
)


@given(PARAMETERS, st.integers(0, 100))
def test_kinds_have_their_own_buckets_sent_as_they_are_complete(
    parameters: list[tuple[str, int, str]], limit: int
) -> None:
    kinds = {name: kind for name, _, kind in parameters}
    place = {name: number for number, (name, _, _) in enumerate(parameters)}
    cut = buckets_by_kind(parameters, limit)
    assert sorted(name for bucket in cut for name in bucket) == sorted(kinds)
    assert all(len({kinds[name] for name in bucket}) == 1 for bucket in cut)
    complete = [min(place[name] for name in bucket) for bucket in cut]
    assert complete == sorted(complete, reverse=True)


def test_one_kind_is_cut_as_without_kinds() -> None:
    sizes = [("embedding", 90), ("one", 4), ("two", 5), ("head", 1)]
    assert buckets_by_kind([(name, size, 0) for name, size in sizes], 10) == buckets(sizes, 10)


def test_what_other_ranks_hold_alike_is_a_kind() -> None:
    embedding = "model.embed_tokens.weight"
    assert flat_kind(embedding, embedding, 1) != flat_kind("lm_head.weight", embedding, 1)
    assert flat_kind("model.norm.weight", "model.norm.weight", 4) != flat_kind("up", "up", 1)
    assert flat_kind("up", "up", 1) == flat_kind("down", "down", 1)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_shares_cover_all_and_waste_less_than_one_each(elements: int, ranks: int) -> None:
    assert elements <= even_share(elements, ranks) * ranks < elements + ranks


def paths(cut: list[Unit]) -> list[list[str]]:
    return [[path.removeprefix("model.") for path in unit.modules] for unit in cut]


def test_units_of_a_whole_model() -> None:
    cut = units(range(3), 2, first=True, last=True, tied=False)
    embedding = ["embed_tokens", "embed_positions"]
    assert paths(cut) == [embedding, ["layers.0", "layers.1"], ["layers.2", "norm"], ["lm_head"]]
    assert [unit.gathers(100, 0) for unit in cut] == [1, 2, 1, 1]
    assert [unit.gathers(100, 101) for unit in cut] == [1, 1, 1, 1]


def test_a_tied_embedding_belongs_to_the_root_only_where_both_ends_are() -> None:
    assert paths(units(range(2), 1, first=True, last=True, tied=True)) == [[""], ["layers.0"], ["layers.1"]]
    assert units(range(2), 1, True, False, tied=True) == units(range(2), 1, True, False, tied=False)


def test_units_of_pipeline_stages() -> None:
    assert paths(units(range(4, 7), 1, first=False, last=False, tied=False)) == [
        ["layers.4"],
        ["layers.5"],
        ["layers.6"],
    ]
    assert paths(units(range(7, 8), 4, False, True, tied=False)) == [["layers.7", "norm"], ["lm_head"]]
