"""Shuffling in a window: each sample once an epoch, each shard fetched once, the same here and behind a URL."""

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.train.data import shards
from shoal.train.data.collection import Collection
from shoal.train.data.dataset import Dataset
from shoal.train.data.input import open_loader
from shoal.train.data.prepare import prepare
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.data.window_order import WindowOrder


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any), st.integers(1, 5), st.integers(0, 9))
def test_each_epoch_has_every_sample_once_and_no_more_than_a_window_of_shards_at_a_time(sizes, window, seed):
    bounds = np.cumsum([0, *sizes])
    order = WindowOrder(seed, bounds, window)
    count = int(bounds[-1])
    for epoch in range(3):
        numbers = np.arange(epoch * count, (epoch + 1) * count, dtype=np.uint64)
        found = order.indices(numbers)
        assert sorted(found.tolist()) == list(range(count))
        assert found.tolist() == [int(order.indices(numbers[at : at + 1])[0]) for at in range(count)]
        # Once a shard is left behind it is not met again: open at a time are those first met and not yet last met.
        shard = np.searchsorted(bounds, found.astype(np.int64), side="right") - 1
        spans = [np.flatnonzero(shard == one)[[0, -1]] for one in np.unique(shard)]
        for place in range(count):
            assert sum(first <= place <= last for first, last in spans) <= window


def test_epochs_and_seeds_differ():
    orders = [WindowOrder(seed, range(0, 101, 10), 3).indices(np.arange(200)) for seed in (1, 2)]
    assert orders[0].tolist() != orders[1].tolist()
    assert orders[0][:100].tolist() != orders[0][100:].tolist()


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 400)


def loader_of(path, tmp_path, *more):
    given = ("data.shuffle=window", "data.window=3", "recipe.seq=16", "recipe.batch=4", *more)
    config = load(None, list(given)).config
    return open_loader(config, Collection.open(path), open_tokenizer("bytes"))


@pytest.mark.parametrize("packing", ["true", "false"])
def test_shards_behind_a_url_are_fetched_once_an_epoch_and_give_the_same_rows(
    tmp_path, small_shards, packing
):
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(700)))
    (tmp_path / "b.txt").write_text("many fish as one " * 70)
    here = prepare(str(tmp_path / "*.txt"), cache=tmp_path / "cache", heldout=0.1)
    names = Dataset.open(here).manifest["splits"]["train"]["shards"]
    assert len(names) > 12
    files = fsspec.filesystem("memory")
    files.put(str(here), "/prepared", recursive=True)
    try:
        there = prepare("memory://prepared", cache=tmp_path / "other", keep=3)
        assert not list(there.glob("train-*"))
        local, streamed = (loader_of(path, tmp_path, f"data.packing={packing}") for path in (here, there))
        assert Collection.open(there).fingerprint == Collection.open(here).fingerprint
        stream = streamed.samples.stream
        steps_an_epoch = len(local.samples) // 4
        for step in range(1, 2 * steps_an_epoch + 1):
            one, other = (loader.rows(step, range(4)) for loader in (local, streamed))
            assert one.samples == other.samples
            assert one.tokens.equal(other.tokens) and one.targets.equal(other.targets)
            assert len(list(there.glob("train-*"))) <= 3
            if step == steps_an_epoch:
                # The last few samples of the epoch are still to come, of shards that are here.
                assert set(stream.shards.fetched) == set(names) and set(stream.shards.fetched.values()) == {1}
        assert set(stream.shards.fetched.values()) == {2}
    finally:
        files.rm("/prepared", recursive=True)


def test_a_damaged_shard_is_refused(tmp_path, small_shards):
    (tmp_path / "a.txt").write_text("many fish as one " * 200)
    here = prepare(str(tmp_path / "a.txt"), cache=tmp_path / "cache", heldout=0.1)
    files = fsspec.filesystem("memory")
    files.put(str(here), "/prepared", recursive=True)
    try:
        whole = files.cat_file("/prepared/train-00002.bin")
        files.pipe_file("/prepared/train-00002.bin", b"x" + whole[1:])
        loader = loader_of(prepare("memory://prepared", cache=tmp_path / "other", keep=3), tmp_path)
        with pytest.raises(BadInput, match=r"train-00002.bin of memory://prepared is damaged"):
            for step in range(1, len(loader.samples) // 4 + 1):
                loader.rows(step, range(4))
        assert prepare("memory://prepared", cache=tmp_path / "other", keep=3).is_dir()
        with pytest.raises(BadInput, match="names no file"):
            prepare("memory://nothing", cache=tmp_path / "other")
    finally:
        files.rm("/prepared", recursive=True)
