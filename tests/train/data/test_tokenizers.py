"""Tokenizers: bytes, and a tokenizer.json with every way to say what ends a document."""

import builtins
import json

import numpy as np
import pytest
import tokenizers as hf

from shoal.facts.problem import BadInput
from shoal.train.data.tokenizers import open_tokenizer

WORDS = ["the", "cat", "sat", "on", "mat"]


def save_tokenizer(path, end="<|endoftext|>", words=WORDS):
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = hf.Tokenizer(hf.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    if end:
        tokenizer.add_special_tokens([end])
        tokenizer.post_processor = hf.processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
        )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


def test_bytes():
    tokenizer = open_tokenizer("bytes")
    encoded = tokenizer.encode_batch(["é!", b"ab", ""])
    assert [ids.tolist() for ids in encoded] == [[0xC3, 0xA9, 33], [97, 98], []]
    assert (tokenizer.vocab, tokenizer.end) == (257, 256)
    assert tokenizer.decode([*encoded[0], 256]) == "é!"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_file_encodes_whole_documents_and_adds_nothing(tmp_path):
    tokenizer = open_tokenizer(str(save_tokenizer(tmp_path / "tokenizer.json")))
    encoded = tokenizer.encode_batch(["the cat sat on the mat", b"cat"])
    assert [ids.tolist() for ids in encoded] == [[1, 2, 3, 4, 1, 5], [2]]
    assert (tokenizer.vocab, tokenizer.end) == (7, 6)
    assert tokenizer.decode(np.array([2, 3])) == "cat sat"


def test_a_directory_stands_for_its_tokenizer(tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json")
    assert open_tokenizer(str(tmp_path)).vocab == 7


@pytest.mark.parametrize("eos", ["mat", {"content": "mat", "lstrip": False}])
def test_the_config_beside_it_names_the_end(tmp_path, eos):
    save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert open_tokenizer(str(tmp_path)).end == 5


def test_the_user_names_the_end_and_it_is_part_of_the_fingerprint(tmp_path):
    path = str(save_tokenizer(tmp_path / "tokenizer.json"))
    assert open_tokenizer(path, "cat").end == 2
    assert open_tokenizer(path, "cat").fingerprint != open_tokenizer(path).fingerprint
    with pytest.raises(BadInput, match="'dog' is not in the vocabulary"):
        open_tokenizer(path, "dog")


def test_without_an_end_it_asks_for_one(tmp_path):
    path = save_tokenizer(tmp_path / "tokenizer.json", end=None)
    with pytest.raises(BadInput, match=r"fix: set data\.end_token"):
        open_tokenizer(str(path))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(BadInput, match="no tokenizer at"):
        open_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"is not a tokenizer\.json"):
        open_tokenizer(str(tmp_path))


def test_an_empty_vocabulary_is_refused(tmp_path):
    hf.Tokenizer(hf.models.WordLevel({}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInput, match="empty vocabulary"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize("depth", [500, 100_000])
def test_settings_nested_without_end_are_refused(tmp_path, depth):
    save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text("[" * depth + "]" * depth)
    with pytest.raises(BadInput, match=r"tokenizer_config.json(.|\n)*nested deeper"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_without_end_are_refused(tmp_path, name):
    save_tokenizer(tmp_path / "tokenizer.json")
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadInput, match=rf"{name}(.|\n)*longer than"):
        open_tokenizer(str(tmp_path))


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    path = save_tokenizer(tmp_path / "tokenizer.json")
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadInput, match=r"pip install -e '\.\[hf\]'"):
        open_tokenizer(str(path))
