"""Datasets: streams across shards, damage, vocabulary."""

import json

import numpy as np
import pytest

from shoal.facts.config import DataSection
from shoal.facts.problem import BadInput
from shoal.train.data.collection import Collection
from shoal.train.data.dataset import MANIFEST, Dataset, TokenStream, check_vocabulary, read_manifest
from shoal.train.data.prepare import prepare
from shoal.train.data.samples import cut_samples
from shoal.train.data.shards import write_manifest


@pytest.fixture
def prepared(tmp_path):
    (tmp_path / "a.txt").write_text("some text to train on\n" * 20)
    return prepare(str(tmp_path / "a.txt"), cache=tmp_path / "cache", heldout=0.1)


def test_a_stream_reads_across_shards():
    whole = np.arange(25)
    stream = TokenStream("train", [whole[:10], whole[10:20], whole[20:]], np.array([25]))
    for start in range(26):
        for stop in range(start, 26):
            assert stream.read(start, stop).tolist() == list(range(start, stop))
    with pytest.raises(IndexError):
        stream.read(20, 26)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["train-00000.bin", "heldout-00000.bin", "documents-train.bin"])
def test_a_flipped_bit_is_found_by_verify(prepared, name):
    Dataset.open(prepared, verify=True)
    flip(prepared / name, 3)
    Dataset.open(prepared)
    with pytest.raises(BadInput, match=rf"{name}' is damaged(.|\n)*fix: delete"):
        Dataset.open(prepared, verify=True)


def test_all_missing_and_short_files_are_named_at_once(prepared):
    (prepared / "train-00000.bin").write_bytes(b"short")
    (prepared / "documents-train.bin").unlink()
    with pytest.raises(BadInput) as caught:
        Dataset.open(prepared)
    assert len(caught.value.problems) == 2
    assert all("delete" in problem.fix for problem in caught.value.problems)


def test_a_changed_manifest_is_found(prepared):
    text = (prepared / MANIFEST).read_text()
    (prepared / MANIFEST).write_text(text.replace('"largest_id": 256', '"largest_id": 255'))
    with pytest.raises(BadInput, match="does not match its hash"):
        Dataset.open(prepared)
    (prepared / MANIFEST).write_text(text[:50])
    with pytest.raises(BadInput, match="is not JSON"):
        Dataset.open(prepared)


HOSTILE = {
    "a file above": lambda manifest: manifest["files"].update(
        {"../a.bin": manifest["files"].pop("train-00000.bin")}
    ),
    "an absolute shard": lambda manifest: manifest["splits"]["train"].update(shards=["/etc/passwd"]),
    "a shard that is not listed": lambda manifest: manifest["splits"]["train"].update(
        shards=["train-00009.bin"]
    ),
    "a shard too many": lambda manifest: manifest["splits"]["train"]["shards"].append("train-00000.bin"),
    "objects": lambda manifest: manifest.update(dtype="O"),
    "records": lambda manifest: manifest.update(dtype=[["a", "<u2"]]),
    "no split": lambda manifest: manifest["splits"].pop("heldout"),
    "splits that are a list": lambda manifest: manifest.update(splits=[]),
    "no files": lambda manifest: manifest.update(files=None),
    "tokens below zero": lambda manifest: manifest["splits"]["train"].update(tokens=-5),
    "tokens without end": lambda manifest: manifest["splits"]["train"].update(tokens=10**40),
    "documents that are true": lambda manifest: manifest["splits"]["train"].update(documents=True),
    "a largest id of text": lambda manifest: manifest.update(largest_id="9"),
    "no largest id": lambda manifest: manifest.pop("largest_id"),
    "a tokenizer of nothing": lambda manifest: manifest.update(tokenizer=None),
    "deep": lambda manifest: manifest.update(deep=json.loads("[" * 300 + "]" * 300)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_manifest_made_by_hand_is_refused(prepared, kind):
    """Its hash is right, and what it says is not."""
    manifest = read_manifest(prepared)
    HOSTILE[kind](manifest)
    (prepared / MANIFEST).unlink()
    write_manifest(prepared / MANIFEST, manifest)
    with pytest.raises(BadInput, match=r"is damaged(.|\n)*fix: delete"):
        Dataset.open(prepared)


def test_documents_end_where_the_tokens_do(prepared):
    ends = np.fromfile(prepared / "documents-train.bin", dtype="<i8")
    for wrong in (-1, 0, ends[-1] + 1, 2**62):
        np.array([*ends[:-1], wrong], dtype="<i8").tofile(prepared / "documents-train.bin")
        with pytest.raises(BadInput, match="do not end where"):
            cut_samples(Collection.open(prepared), DataSection(), 8, 0)


def test_somebody_elses_directory_is_not_to_be_deleted(tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps({"torch": "2.13"}))
    with pytest.raises(BadInput) as caught:
        Dataset.open(tmp_path)
    assert "is not a prepared dataset" in str(caught.value)
    assert not caught.value.problems[0].fix.startswith("delete")


def test_the_fingerprint_is_of_the_tokens(tmp_path, prepared):
    (tmp_path / "b.txt").write_text("some text to train on\n" * 20)
    again = prepare(str(tmp_path / "b.txt"), cache=tmp_path / "elsewhere", heldout=0.1)
    other = prepare(str(tmp_path / "b.txt"), cache=tmp_path / "elsewhere", heldout=0.2)
    assert Dataset.open(again).fingerprint == Dataset.open(prepared).fingerprint
    assert Dataset.open(other).fingerprint != Dataset.open(prepared).fingerprint


def test_the_vocabulary_must_hold_every_token(prepared):
    dataset = Dataset.open(prepared)
    check_vocabulary(dataset, 257)
    message = "the data's largest token is 256 but the model's vocabulary is 256(.|\n)*at least 257"
    with pytest.raises(BadInput, match=message):
        check_vocabulary(dataset, 256)
