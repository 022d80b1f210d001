"""``shoal init``: planned configs that really train, questions on a terminal, conversions that say what is refused."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Capture, shoal_
from tests.plan.exporting import ask

from shoal.facts.config.file import load
from shoal.facts.model import presets
from shoal.facts.model.huggingface import write_config
from shoal.plan.export import export
from shoal.plan.resolve import resolve


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_key_at_its_default(capsys: Capture) -> None:
    assert shoal_(capsys, "init")[0] == 0
    text = Path("shoal.toml").read_text("utf-8")
    assert not any("NOT YET" in line for line in text.splitlines() if line.startswith("# lr "))
    assert load(Path("shoal.toml")).config.model_dump(exclude={"run"}) == load(None).config.model_dump(
        exclude={"run"}
    )


def test_planned_for_a_cluster(capsys: Capture) -> None:
    code, out, err = shoal_(
        capsys, "init", "big.toml", "--model", "llama3-8b", "--on", "8xH100", "--seq", "2048"
    )
    assert code == 0
    assert out == "wrote big.toml; edit it, then: shoal train big.toml\n"
    job = resolve(load(Path("big.toml")).config)
    assert (job.model.name, job.cluster.devices, job.layout.world) == ("llama3-8b", 8, 8)
    assert (job.config.recipe.seq, job.config.recipe.precision, job.config.recipe.lr) == (2048, "bf16", 3e-4)
    assert str(job.layout) in err
    text = Path("big.toml").read_text("utf-8")
    assert "# Predicted: " in text and "shoal plan llama3-8b --on 8xH100 --seq 2048 --batch 16" in text
    # The planner's own choice, and what layout = "auto" would train.
    chosen = resolve(load(Path("big.toml"), layout="auto").config).layout
    assert chosen == job.layout


def test_a_layout_of_ones_own(capsys: Capture) -> None:
    asked = ["init", "--model", "llama3-8b", "--on", "8xH100", "--layout", "fsdp=4,tp=2,micro=1"]
    assert shoal_(capsys, *asked)[0] == 0
    assert load(Path("shoal.toml")).config.layout == "fsdp=4,tp=2,micro=1"
    code, _, err = shoal_(capsys, *asked[:-1], "fsdp=3", "--force")
    assert code == 2 and "fsdp=3" in err


def test_a_config_from_init_trains(capsys: Capture) -> None:
    Path("texts").mkdir()
    rows = "\n".join(json.dumps({"id": number, "body": f"row {number} " * 40}) for number in range(40))
    Path("texts/rows.jsonl").write_text(rows, encoding="utf-8")
    Path("configs").mkdir()
    asked = [
        "--data",
        "texts/*.jsonl",
        "--on",
        "2xcpu",
        "--seq",
        "32",
        "--batch",
        "4",
        "--steps",
        "2",
        "--yes",
    ]
    assert shoal_(capsys, "init", "configs/small.toml", *asked)[0] == 0
    config = load(Path("configs/small.toml")).config
    assert (config.layout, config.data.field) == ("dp=2", "body")  # the only text in a row
    done = train("configs/small.toml")
    assert done.returncode == 0, done.stderr
    assert len(Path("runs/small/metrics.jsonl").read_text("utf-8").splitlines()) == 2


def train(config: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", "train", config, "--set", "data.cache=cache"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.long
@pytest.mark.parametrize("stack", ["megatron", "deepspeed"])
def test_a_converted_config_trains(capsys: Capture, stack: str) -> None:
    workload = ask("fsdp=2,micro=1", "tiny", "2xcpu", seq=32, batch=4, steps=2, precision="fp32", lr=1e-2)
    for name, text in export(stack, workload).files.items():
        Path(name).write_text(text, encoding="utf-8")
    name = {"megatron": "megatron.sh", "deepspeed": "ds_config.json"}[stack]
    more = ["--seq", "32", "--model", "tiny"] if stack == "deepspeed" else []
    code, _, err = shoal_(
        capsys, "init", "run.toml", "--from", name, "--on", "2xcpu", "--data", "stdlib", *more
    )
    assert code == 0 and "refuse" not in err
    done = train("run.toml")
    assert done.returncode == 0, done.stderr
    assert len(Path("runs/run/metrics.jsonl").read_text("utf-8").splitlines()) == 2


def test_a_model_that_no_preset_has_is_written_beside(capsys: Capture) -> None:
    Path("m.sh").write_text(
        "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm "
        "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
        "--max-position-embeddings 128 --seq-length 64 --vocab-size 300 --micro-batch-size 1 --train-iters 2 "
        "--lr 0.001 --hidden-dropout 0 --attention-dropout 0",
        encoding="utf-8",
    )
    assert shoal_(capsys, "init", "own.toml", "--from", "m.sh", "--on", "1xcpu")[0] == 0
    job = resolve(load(Path("own.toml")).config)
    assert (job.model.family, job.model.layers, job.model.vocab) == ("llama", 3, 300)
    assert Path("own.model.json").is_file()
    assert shoal_(capsys, "init", "own.toml", "--from", "m.sh", "--on", "1xcpu")[0] == 2


def test_what_the_engine_will_refuse_is_said_and_marked(capsys: Capture) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": "/scratch"},
        },
        "fp16": {"enabled": True},
        "wall_clock_breakdown": True,
    }
    Path("ds.json").write_text(json.dumps(settings), encoding="utf-8")
    code, out, err = shoal_(capsys, "init", "--from", "ds.json", "--on", "8xH100", "--model", "llama3-8b")
    assert code == 0 and "put right what is refused" in out
    assert (
        'the engine will refuse: layout: offload=optimizer with recipe.precision = "fp16": this version of Shoal '
        "does not train with it" in err
    )
    assert "note: wall_clock_breakdown = True: no counterpart, left out" in err.splitlines()
    text = Path("shoal.toml").read_text("utf-8")
    assert "# REFUSED: layout: offload=optimizer with" in text
    assert load(Path("shoal.toml")).config.layout == "fsdp=8,micro=1,offload=optimizer+params@nvme"
    _, out, _ = shoal_(capsys, "init", "--from", "ds.json", "--on", "8xH100", "--force", "--json")
    shown = json.loads(out)
    assert shown["written"] == ["shoal.toml"]
    assert "not in the file, so Shoal's default holds: recipe.seq = 128, recipe.lr = 0.01" in "".join(
        shown["notes"]
    )
    assert "offload=optimizer" in shown["refused"][0]["what"] and shown["refused"][0]["fix"]


def test_weights_are_trained_further(capsys: Capture) -> None:
    folder = Path("models/own")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(write_config(presets.find("tiny"))), encoding="utf-8")
    assert shoal_(capsys, "init", "a.toml", "--model", "models/own", "--on", "1xcpu")[0] == 0
    assert load(Path("a.toml")).config.model.init_from is None
    (folder / "model.safetensors").write_bytes(b"")
    assert shoal_(capsys, "init", "b.toml", "--model", "models/own", "--on", "1xcpu")[0] == 0
    config = load(Path("b.toml")).config
    assert config.model.init_from == str(folder.absolute()) and config.recipe.lr == 2e-5


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"text": "a", "title": "much longer than the text"}, {}),
        ({"prompt": "a", "completion": "b"}, {"format": "prompt", "template": "none"}),
        ({"id": 1, "content": "a text"}, {"field": "content"}),
    ],
)
def test_rows_say_what_they_are(capsys: Capture, row: dict[str, Any], kept: dict[str, str]) -> None:
    Path("rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert shoal_(capsys, "init", "--data", "rows.jsonl")[0] == 0
    data = load(Path("shoal.toml")).config.data
    assert data.source == str(Path("rows.jsonl").absolute())
    for name, value in {"field": "text", "format": "text", "template": "auto", **kept}.items():
        assert getattr(data, name) == value


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama9"], "'llama9' is neither a preset"),
        (["--on", "8xH1000"], "not in the catalogue"),
        (["--data", "nothing/*.txt"], "--data 'nothing/*.txt' names no file"),
        (["--data", "chat.jsonl"], "has no tokenizer with a chat template"),
        (["--seq", "0"], "recipe.seq"),
        (["--model", "llama3-405b", "--on", "1xH100"], "no layout that the engine runs is predicted to fit"),
        (["--gpus", "8"], "--gpus goes with --from"),
        (["nowhere/a.toml", "--yes"], "there is no directory nowhere"),
        (["--from", "ds.json", "--model", "llama9"], "'llama9' is neither a preset"),
        (["--from", "ds.json", "--layout", "tp=x"], "tp=x"),
    ],
)
def test_bad_input_writes_nothing(capsys: Capture, arguments: list[str], said: str) -> None:
    Path("chat.jsonl").write_text(json.dumps({"messages": []}) + "\n", encoding="utf-8")
    Path("ds.json").write_text(json.dumps({"train_batch_size": 8}), encoding="utf-8")
    more = ["--gpus", "2"] if "--from" in arguments else []
    code, out, err = shoal_(capsys, "init", *arguments, *more)
    assert (code, out) == (2, "")
    assert said in err and "  fix: " in err
    assert not list(Path().glob("*.toml"))


# Questions, on a terminal.


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.screen = ""
        self.process, self.end = pty.fork()
        if self.process == 0:
            os.execv(sys.executable, [sys.executable, "-m", "shoal", *arguments])

    def wait_for(self, text: str, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while text not in self.screen:
            ready, _, _ = select.select([self.end], [], [], max(0, until - time.monotonic()))
            assert ready, self.screen
            try:
                self.screen += os.read(self.end, 4096).decode()
            except OSError:  # the other side has ended
                assert text in self.screen, self.screen
        self.screen = self.screen[self.screen.index(text) + len(text) :]

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def ends_with(self) -> int:
        while True:
            try:
                if not (more := os.read(self.end, 4096)):
                    break
            except OSError:
                break
            self.screen += more.decode()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def test_questions_are_asked_until_answered() -> None:
    terminal = Terminal("init", "asked.toml", "--data", "stdlib")
    terminal.wait_for("Model: a preset, a model directory, a Hub name [tiny] ")
    terminal.type("tinny\n")
    terminal.wait_for("did you mean 'tiny'?")
    terminal.wait_for("[tiny] ")
    terminal.type("tiny-moe\n")
    terminal.wait_for("[local] ")  # the data was said
    terminal.type("2xcpu\n")
    terminal.wait_for("Tokens per sequence [128] ")
    terminal.type("many\n")
    terminal.wait_for("'many' is not a whole number above 0")
    terminal.type("64\n")
    terminal.wait_for("Sequences per step, over all ranks [16] ")
    terminal.type("\n")
    terminal.wait_for("wrote asked.toml")
    assert terminal.ends_with() == 0
    job = resolve(load(Path("asked.toml")).config)
    assert (job.model.name, job.layout.world, job.config.recipe.seq) == ("tiny-moe", 2, 64)


def test_questions_that_are_not_answered() -> None:
    terminal = Terminal("init")
    terminal.wait_for("[tiny] ")
    terminal.type("\x04")  # the end of what is typed
    assert terminal.ends_with() == 2
    assert "the questions were not answered" in terminal.screen
    assert not Path("shoal.toml").exists()


def test_nothing_is_asked_where_the_answer_is_lost() -> None:
    Path("shoal.toml").write_text("mine", encoding="utf-8")
    terminal = Terminal("init")
    assert terminal.ends_with() == 2
    assert "shoal.toml exists" in terminal.screen and "[tiny]" not in terminal.screen
