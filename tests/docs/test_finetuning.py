"""The three commands that the README and the quickstart promise a newcomer, and the examples: as written, but small."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.docs.chat_model import write_chat_model

from shoal.cli.main import main
from shoal.train.checkpoint.read import Checkpoint

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
# What keeps it small: nothing that the commands are about.
SMALL = {
    "recipe.seq": 64,
    "recipe.batch": 8,
    "data.cache": "cache",
    "cluster.on": "2xcpu",
    "data.heldout": 0.2,
}

Output = pytest.CaptureFixture[str]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny chat model as transformers saves it, and conversations."""
    write_chat_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shoal(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


def small(**more: object) -> list[str]:
    return [word for key, value in (SMALL | more).items() for word in ("--set", f"{key}={value}")]


def test_the_three_commands(files: Path, capsys: Output) -> None:
    section = README.partition("From chat data and a base model")[2]
    block = re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[0]
    assert f"```\n{block}```" in PAGE  # with what each of them does
    train, export, ask = (shlex.split(line) for line in block.splitlines())
    assert [words[0] for words in (train, export, ask)] == ["shoal", "shoal", "python"]
    train[train.index("fsdp=8")] = "fsdp=2"
    shoal(*train[1:], *small())
    told = capsys.readouterr()
    assert f"tokenizer: {files / 'model'}, as model.init_from has it" in told.err
    assert "note: recipe.lr" not in told.err  # it was written
    assert 'shoal generate runs/fish "…" --chat' in told.out
    rows = [json.loads(line) for line in (files / "runs/fish/metrics.jsonl").read_text().splitlines()]
    shoal(*export[1:])
    written, before = (load_file(files / name / "model.safetensors") for name in ("fish", "model"))
    stored = Checkpoint(files / "runs" / "fish" / "checkpoints" / f"step-{rows[-1]['step']:08d}")
    assert all(torch.equal(tensor, stored.tensor("weight", name)) for name, tensor in written.items())
    assert not torch.equal(written["model.norm.weight"], before["model.norm.weight"])
    capsys.readouterr()
    # Greedy, so that it can be compared: the pipeline would draw, and so would we.
    exec(ask[2].replace("max_new_tokens=20", "max_new_tokens=20, do_sample=False"), {})
    answer = capsys.readouterr().out
    asked = ("generate", "runs/fish", "Why do fish school?", "--chat", "--tokens", "20")
    shoal(*asked, "--temperature", "0", "--json")
    assert json.loads(capsys.readouterr().out)["text"] + "\n" == answer
    assert "within_documents = true" in (files / "runs/fish/config.toml").read_text()


@pytest.mark.parametrize("name,layout", [("lora", "fsdp=2"), ("qlora", "dp=1,recompute=full")])
def test_the_examples_for_adapters(
    files: Path, name: str, layout: str, tmp_path: Path, capsys: Output
) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    shape = LlamaForCausalLM.from_pretrained(files / "model").config
    shape.hidden_size = shape.intermediate_size = 64  # the least that 4 bits take
    shape.head_dim = 16
    LlamaForCausalLM(shape).save_pretrained(files / "model")
    places = {"model.init_from": files / "model", "data.source": files / "chat.jsonl"}
    few = {"recipe.epochs": 1, "recipe.precision": "fp32"}
    shoal("train", str(ROOT / "examples" / f"{name}.toml"), *small(**places, **few), "--layout", layout)
    run = files / "runs" / name
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last
        == f"  shoal checkpoint export runs/{name} --to peft runs/{name}-adapter  for PEFT, the adapters alone"
    )
    shoal("checkpoint", "export", str(run), str(tmp_path / "adapter"), "--to", "peft")
    shoal("checkpoint", "export", str(run), str(tmp_path / "merged"), "--to", "hf")
    base, merged = map(LlamaForCausalLM.from_pretrained, (files / "model", tmp_path / "merged"))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(tokens).logits
        ours = merged(tokens).logits
    # What QLoRA merges into are the weights as 4 bits have them.
    assert torch.allclose(adapted, ours, atol=1e-5) == (name == "lora")
    assert torch.allclose(adapted, ours, atol=0.5)


def test_the_example_for_conversations(files: Path, capsys: Output) -> None:
    places = {"model.init_from": files / "model", "data.source": files / "chat.jsonl"}
    few = {"recipe.epochs": 1, "recipe.precision": "fp32"}
    shoal("train", str(ROOT / "examples" / "chat.toml"), *small(**places, **few), "--layout", "dp=1")
    assert (files / "runs" / "chat" / "checkpoints").is_dir()
    # A default rate that is far too high for such weights is said.
    bare = small(**places, **{"data.format": "chat", "recipe.steps": 1})
    capsys.readouterr()
    shoal("train", *bare, "--layout", "dp=1", "--run", "runs/bare")
    assert "recipe.lr is not set" in capsys.readouterr().err


def rows_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def texts(path: Path) -> Path:
    path.write_text(
        "".join(json.dumps({"text": f"Fish {number} swims below the reef. "}) + "\n" for number in range(60))
    )
    return path


def test_the_example_for_pretraining(files: Path) -> None:
    """The shape is the example's own but for its size, which is what a test has to change."""
    shape = json.loads((ROOT / "examples" / "pretrain.json").read_text())
    shape |= {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    (files / "shape.json").write_text(json.dumps(shape))
    places = {"model.path": files / "shape.json", "data.source": texts(files / "corpus.jsonl")}
    places |= {"data.tokenizer": files / "model" / "tokenizer.json"}
    few = {"recipe.tokens": 2048, "recipe.precision": "fp32", "recipe.warmup": 1}
    shoal("train", str(ROOT / "examples" / "pretrain.toml"), *small(**places, **few), "--layout", "dp=1")
    losses = [row["loss"] for row in rows_of(files / "runs" / "pretrain")]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_the_example_for_continued_pretraining(files: Path) -> None:
    places = {"model.init_from": files / "model", "data.source": texts(files / "corpus.jsonl")}
    places |= {"data.tokenizer": files / "model" / "tokenizer.json"}
    few = {"recipe.tokens": 2048, "recipe.precision": "fp32"}
    shoal("train", str(ROOT / "examples" / "own-text.toml"), *small(**places, **few), "--layout", "dp=1")
    assert len(rows_of(files / "runs" / "own-text")) == 4
    (step,) = (files / "runs" / "own-text" / "checkpoints").iterdir()
    before = load_file(files / "model" / "model.safetensors")["model.norm.weight"]
    after = Checkpoint(step).tensor("weight", "model.norm.weight")
    assert 0 < float((after - before).abs().max()) < 1e-3  # it began with the model's weights


def test_the_example_for_preferences(files: Path, capsys: Output) -> None:
    rows = [
        {
            "prompt": f"Which fish is number {number}?",
            "chosen": f"The {('red', 'tall', 'round')[number % 3]} one.",
            "rejected": "None.",
        }
        for number in range(60)
    ]
    (files / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {"model.init_from": files / "model", "data.source": files / "preferences.jsonl"}
    few = {"recipe.precision": "fp32", "recipe.lr": 1e-3}
    shoal("train", str(ROOT / "examples" / "dpo.toml"), *small(**places, **few), "--layout", "fsdp=2,micro=2")
    seen = rows_of(files / "runs" / "dpo")
    assert seen[0]["loss"] == pytest.approx(0.6931471805599453)
    assert seen[-1]["reward_accuracy"] == seen[-1]["heldout_reward_accuracy"] == 1.0
    assert "nats/pair" in capsys.readouterr().out
    # What it learned is an ordinary model, which says why its preferences are not to be judged without the first one.
    shoal("checkpoint", "export", "runs/dpo", "--to", "hf", "my-dpo")
    assert load_file(files / "my-dpo" / "model.safetensors").keys()
    capsys.readouterr()
    with pytest.raises(SystemExit) as refused:
        main(["evaluate", "runs/dpo"])
    assert (
        refused.value.code == 2
        and "compares with the weights that the run began with" in capsys.readouterr().err
    )
