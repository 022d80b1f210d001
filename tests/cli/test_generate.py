"""``shoal generate``: what ``transformers`` writes with the same weights, with a cache, in any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.conftest import Train
from tests.train.huggingface.models import FAMILIES, load, save_random

from shoal.cli.main import main
from shoal.facts.redact import printable
from shoal.train.huggingface.byte_tokenizer import tokenizer_config, tokenizer_json

Output = pytest.CaptureFixture[str]
PROMPT = "the shoal turns"


def shoal(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["generate", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def written(capsys: Output, *arguments: object) -> dict[str, Any]:
    assert shoal(*arguments, "--json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def model_directory(family: str, path: Path) -> Path:
    """Weights far enough apart that greedy choices are no matter of rounding."""
    # A token's own embedding is so much of what a small Gemma sees that a tied head would say it again and again.
    apart = {"tie_word_embeddings": False} if family.startswith("gemma") else {}
    model = save_random(family, path, **apart)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_json())
    (path / "tokenizer_config.json").write_text(tokenizer_config(64))
    return path


def greedy(path: Path, count: int) -> list[int]:
    model = load(path)
    tokens = torch.tensor([list(PROMPT.encode())])
    for _ in range(count):
        with torch.no_grad():
            chosen = model(tokens, use_cache=False).logits[:, -1].argmax(-1)
        if int(chosen) == 256:
            break
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
    found: list[int] = tokens[0, len(PROMPT) :].tolist()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str, tmp_path: Path, capsys: Output) -> None:
    """Also across a sliding window of 11 (mistral, in turns gemma)."""
    path = model_directory(family, tmp_path / "model")
    expected = greedy(path, 30)
    assert len(set(expected)) > 5
    found = written(capsys, path, PROMPT, "--tokens", 30, "--temperature", 0, "--precision", "fp64")
    assert found["tokens"] == expected and found["prompt"] == PROMPT


@pytest.mark.parametrize(
    ("family", "layout"),
    [*(("mistral", layout) for layout in ("tp=2", "pp=2", "fsdp=2", "cp=2")), ("gemma2", "tp=2")],
)
def test_any_layout_writes_the_same(family: str, layout: str, tmp_path: Path, capsys: Output) -> None:
    path = model_directory(family, tmp_path / "model")
    alone = written(capsys, path, PROMPT, "--tokens", 12, "--precision", "fp64")
    split = written(capsys, path, PROMPT, "--tokens", 12, "--precision", "fp64", "--layout", layout)
    assert split["tokens"] == alone["tokens"] and split["layout"] == layout


def test_text_from_a_run_and_from_what_was_exported(train: Train, tmp_path: Path, capsys: Output) -> None:
    run = train("run", recipe__steps=4, checkpoint__every=2, checkpoint__keep=9).directory
    with pytest.raises(SystemExit):
        main(["checkpoint", "export", str(run.path), "--to", "hf", str(tmp_path / "exported")])
    capsys.readouterr()
    texts = [
        written(capsys, origin, PROMPT, "--tokens", 20, "--seed", 3)["text"]
        for origin in (run.path, run.checkpoints / "step-00000004", tmp_path / "exported")
    ]
    assert texts[0] and len(set(texts)) == 1
    earlier = run.checkpoints / "step-00000002"
    assert written(capsys, earlier, PROMPT, "--tokens", 20, "--seed", 3)["text"] != texts[0]
    assert written(capsys, run.path, PROMPT, "--tokens", 20, "--seed", 4)["text"] != texts[0]
    # For people: the prompt and what follows, as it comes.
    assert shoal(run.path, PROMPT, "--tokens", 20, "--seed", 3) == 0
    assert capsys.readouterr().out == printable(PROMPT + texts[0]) + "\n"


def test_draws_from_few_candidates(tmp_path: Path, capsys: Output) -> None:
    path = model_directory("llama", tmp_path / "model")
    likeliest = written(capsys, path, PROMPT, "--tokens", 10, "--temperature", 0)["tokens"]
    for option in (("--top-k", 1), ("--top-p", 1e-6)):
        found = written(capsys, path, PROMPT, "--tokens", 10, "--temperature", 5, *option)
        assert found["tokens"] == likeliest
    assert written(capsys, path, PROMPT, "--tokens", 10, "--temperature", 5)["tokens"] != likeliest


def test_an_answer_to_a_message(tmp_path: Path, capsys: Output) -> None:
    path = model_directory("llama", tmp_path / "model")
    assert shoal(path, "hi", "--chat") == 2
    assert "chat template" in capsys.readouterr().err
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found = written(capsys, path, "hi", "--chat", "--system", "be brief", "--tokens", 4)
    assert found["prompt"] == "[system]be brief[user]hi[assistant]"
    # A second token that ends a text: the first that would be written.
    first = written(capsys, path, "hi", "--chat", "--temperature", 0, "--tokens", 4)["tokens"]
    transformers.GenerationConfig(eos_token_id=[256, first[1]]).save_pretrained(path)
    ended = written(capsys, path, "hi", "--chat", "--temperature", 0, "--tokens", 4)
    assert ended["tokens"] == first[:1] and ended["ended"]


def test_a_prompt_begins_as_its_tokenizer_has_it(tmp_path: Path, capsys: Output) -> None:
    """Llama's begins every text with a token of its own; transformers continues from there, and so do we."""
    path = model_directory("llama", tmp_path / "model")
    plain = written(capsys, path, PROMPT, "--tokens", 8, "--temperature", 0)["tokens"]
    content = json.loads((path / "tokenizer.json").read_text())
    end = {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": end["id"], "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {end["id"]: end},
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    begun = written(capsys, path, PROMPT, "--tokens", 8, "--temperature", 0)["tokens"]
    theirs = transformers.AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt")["input_ids"]
    assert theirs[0, 0] == 256
    with torch.no_grad():
        assert begun[0] == int(load(path)(theirs).logits[0, -1].argmax())
    assert begun != plain


def test_bad_input_is_one_line(tmp_path: Path, capsys: Output) -> None:
    path = model_directory("llama", tmp_path / "model")
    for words, reason in (
        ((tmp_path / "none", "x"), "does not exist"),
        ((path, "x" * 64), "the prompt has 64 tokens"),
        ((path, "x", "--layout", "tp=3"), "heads"),
        ((path, "x", "--system", "y"), "--system without --chat"),
        ((path, "x", "--tokenizer", tmp_path / "none"), "there is no tokenizer"),
    ):
        assert shoal(*words) == 2
        assert reason in capsys.readouterr().err
