"""What is not written: the model's own tokenizer, conversations that do not read each other; and what a run keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.announce import _notes
from shoal.facts.config import DataSection
from shoal.facts.config.file import Loaded, load
from shoal.facts.config.implied import kept
from shoal.facts.problem import BadInput
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.huggingface.byte_tokenizer import tokenizer_json


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}, "merges": []}}))
    return folder


def tokenizer(loaded: Loaded) -> tuple[str, str]:
    return loaded.config.data.tokenizer, loaded.origin("data.tokenizer")


def test_weights_and_shapes_bring_their_tokenizer(model: Path, tmp_path: Path) -> None:
    assert tokenizer(load(None, [f"model.init_from={model}"])) == (str(model), "model.init_from")
    assert tokenizer(load(None, [f"model.path={model}/config.json"])) == (str(model), "model.path")
    written = load(None, [f"model.init_from={model}", "data.tokenizer=bytes"])
    assert tokenizer(written) == ("bytes", "--set")
    assert tokenizer(load(None)) == ("bytes", "default")
    # A run has what it was trained with; so has each of its checkpoints.
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "config.toml").write_text('[data]\ntokenizer = "words"\n')
    for place in (run, run / "checkpoints" / "step-00000002"):
        assert tokenizer(load(None, [f"model.init_from={place}"]))[0] == "words"
    # What an export of a run on bytes has in its place is bytes.
    (model / "tokenizer.json").write_text(tokenizer_json())
    assert tokenizer(load(None, [f"model.init_from={model}"])) == ("bytes", "default")


@pytest.mark.parametrize("form", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_in_another_form_is_never_taken_for_bytes(model: Path, form: str) -> None:
    (model / "tokenizer.json").unlink()
    assert tokenizer(load(None, [f"model.init_from={model}"])) == ("bytes", "default")
    given = load(None, [f"model.init_from={model}"])
    assert any("has no tokenizer, so text becomes bytes" in note for note in _notes(given))
    (model / form).write_text("x")
    loaded = load(None, [f"model.init_from={model}"])
    assert tokenizer(loaded) == (str(model), "model.init_from")
    with pytest.raises(BadInput, match=f"has {form} and no tokenizer.json") as refused:
        open_tokenizer(loaded.config.data.tokenizer)
    (problem,) = refused.value.problems
    assert problem.fix is not None and "save_pretrained" in problem.fix


def test_a_run_keeps_what_it_began_with(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[data]\ntokenizer = "bytes"\nwithin_documents = false\n')
    sets = [f"model.init_from={model}", "data.format=chat"]
    now = load(None, sets)
    data = kept(now.config, now.origins, tmp_path).data
    assert (now.config.data.tokenizer, now.config.data.within_documents) == (str(model), True)
    assert (data.tokenizer, data.within_documents) == ("bytes", False)
    written = load(None, [*sets, "data.tokenizer=words", "data.within_documents=true"])
    assert kept(written.config, written.origins, tmp_path) == written.config
    assert kept(now.config, now.origins, tmp_path / "none") == now.config


def test_conversations_stay_apart_unless_one_says_otherwise() -> None:
    assert not DataSection().within_documents
    assert DataSection(format="prompt").within_documents
    assert DataSection.model_validate(
        {"mix": [{"source": "a"}, {"source": "b", "format": "chat"}]}
    ).within_documents
    assert not DataSection(format="chat", within_documents=False).within_documents


def test_a_source_beside_a_mix_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "both.toml"
    path.write_text('[data]\nsource = "a.txt"\n[[data.mix]]\nsource = "b.txt"\n')
    with pytest.raises(BadInput) as caught:
        load(path)
    (problem,) = caught.value.problems
    assert problem.what == f"{path}:1: data: source = … and mix = … are both set"
    assert problem.fix == "keep one: data.source or data.mix"
