"""What a reader of a page has and types: its commands one after another, as they stand there but small.

Only sizes change (steps, ranks, faults, rounds; a model for one of a GPU's size), a placeholder becomes a name, and a
job for an engine that is not here is written instead of sent. What a page speaks of without making it (a config, a
model, data, a run) lies there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.conftest import WORDS
from tests.docs.chat_model import write_chat_model
from tests.docs.shown import ROOT, blocks_of, put
from tests.plan.test_link_files import log

from shoal.cli.main import main

CONFIG = """
[data]
source = "corpus.jsonl"
cache = "cache"
heldout = 0.2
[recipe]
seq = 32
batch = 8
steps = 4
warmup = 1
[evaluate]
every = 2
batches = 1
sample_tokens = 4
[checkpoint]
every = 2
[cluster]
on = "2xcpu"
"""
DPO = """
[model]
init_from = "model"
[data]
source = "preferences.jsonl"
format = "preference"
cache = "cache"
[recipe]
loss = "dpo"
seq = 80
batch = 8
[cluster]
on = "2xcpu"
share = true
"""
# Those that need nothing of a page's earlier commands: run once, on the first page that shows them.
ALONE = ("bench", "chaos", "doctor", "dryrun", "parity", "plan", "profile", "schedule")
LARGE_LAYOUT = "fsdp=128,tp=8,pp=16,micro=1"
# Whatever the command: a world of two cores, a placeholder's name, an engine that is not here.
ANYWHERE = {
    "fsdp=16": "fsdp=2",
    "fsdp=8": "fsdp=2",
    "fsdp=4,tp=2": "fsdp=2",
    "--submit": "--dry-run",
    "CONFIG": "config.toml",
    "MODEL": "model",
    "model.init_from=MODEL": "model.init_from=model",
    "s3://bucket/runs": "store",
    "step-00000400": "step-00000002",
    "HEAD": "head",
    "ACCOUNT": "123456789012",
    "REGION": "eu-west-1",
    "REGISTRY": "registry",
}


def settings(**values: object) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


SMALL_TRAINING: dict[str, object] = {
    "recipe__seq": 32, "recipe__batch": 8, "recipe__steps": 4, "recipe__warmup": 1, "checkpoint__every": 2,
    "evaluate__batches": 1, "evaluate__sample_tokens": 4, "data__cache": "cache", "data__heldout": 0.2,
    "recipe__schedule": "constant", "checkpoint__keep": 9,  # so that a run can be extended, and branched from early
    "cluster__on": "2xcpu",
}  # fmt: skip


def small_training(words: list[str]) -> list[str]:
    values = dict(SMALL_TRAINING)
    if any(word.startswith("recipe.epochs") for word in words):
        del values["recipe__steps"]
    if "--extend" in words:
        values["recipe__steps"] = 6
    if words[0] == "tune":
        values["recipe__steps"] = 14  # two layouts take six each
    if not any(word.startswith("data.source") for word in words):
        values["data__source"] = "corpus.jsonl"
    return words + settings(**values)


def small_parity(words: list[str]) -> list[str]:
    thirds = any("fsdp=3" in word for word in words)
    words = put(words, steps=1) + settings(recipe__batch=24 if thirds else 8, cluster__share="true")
    if not any("my-dpo" in word for word in words):
        words += settings(recipe__seq=32, data__source="corpus.jsonl", data__cache="cache")
    for named, few in (("full", "dp=2;fsdp=2;pp=2"), ("experts", "dp=2,ep=2"), ("4d", "dp=2,ep=2")):
        words = [few if word == named else word for word in words]
    return words if "--strict" in words else put(words, precision="fp64")


def small_dryrun(words: list[str]) -> list[str]:
    """Of 405B's 16 stages and 126 layers, two and 16; 1B for 8B, and small experts for Mixtral's."""
    fewer = {"llama3-405b": "llama3.2-1b", "llama3-8b": "llama3.2-1b", "mixtral-8x7b": "tiny-moe"}
    if LARGE_LAYOUT in words:
        fewer |= {"16384xH100": "8xH100", "2048": "16", LARGE_LAYOUT: "fsdp=2,tp=2,pp=2,micro=1"}
    return [fewer.get(word, word) for word in words]


def small_bench(words: list[str]) -> list[str]:
    if words[1] == "comm" and "--show" not in words:
        return put(words, sizes="4K,64K")
    if words[1] == "step":
        words = ["tiny" if word in ("llama3.2-1b", "llama3-8b") else word for word in words]
        return put(words, seq=32, batch=4, rounds=1, steps=1, warm_up=1, peers="shoal,pytorch")
    return words


def small_profile(words: list[str]) -> list[str]:
    if "--calibrate" in words:
        return words
    return put(words, steps=1) + settings(recipe__seq=32, data__source="corpus.jsonl", data__cache="cache")


SMALLER: dict[str, Callable[[list[str]], list[str]]] = {
    "bench": small_bench,
    "chaos": lambda words: put(words, faults=1),  # run elsewhere
    "dryrun": small_dryrun,
    "parity": small_parity,
    "profile": small_profile,
    "train": small_training,
    "tune": small_training,
    "replay": lambda words: ["3" if word == "1234" else word for word in words],
    "evaluate": lambda words: [word.replace("recipe.seq=2048", "recipe.seq=32") for word in words],
    "generate": lambda words: ["8" if word == "100" else word for word in words],
}


def small(words: tuple[str, ...]) -> list[str]:
    """The words behind ``shoal`` as they are run."""
    pattern = re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, ANYWHERE)) + r")(?![\w,])")
    plain = words[0] not in ("plan", "dryrun", "init")  # these know no size that is too large
    found = [pattern.sub(lambda match: ANYWHERE[match[0]], word) if plain else word for word in words]
    return SMALLER.get(words[0], lambda same: same)(found)


def lay_out(place: Path) -> None:
    """All that the pages' reader may have, in the current directory."""
    for name in ("examples", "benchmarks"):
        (place / name).symlink_to(ROOT / name)
    for name in ("config.toml", "my-run.toml", "run.toml"):
        (place / name).write_text(CONFIG)
    write_chat_model(place)
    (place / "models").mkdir()
    (place / "models" / "Llama-3.2-1B").symlink_to(place / "model")
    lines = [" ".join(WORDS[(number + at * at) % len(WORDS)] for at in range(12)) for number in range(200)]
    rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    for name in ("corpus.jsonl", "corpus/part.jsonl", "wiki/part.jsonl"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(rows)
    (place / "code.txt").write_text("\n".join(lines))
    answers = ({"prompt": line, "chosen": "Yes.", "rejected": "No."} for line in lines[:60])
    (place / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    (place / "my-dpo.toml").write_text(DPO)
    (place / "links.log").write_text(log(["a"] * 8) + log([node for node in "abcd" for _ in range(8)], 200e9))
    (place / "docs" / "pictures").mkdir(parents=True)
    stacks = (ROOT / "docs" / "stacks.md").read_text()
    (place / "ds_config.json").write_text(next(text for _, kind, text in blocks_of(stacks) if kind == "json"))


def finished_run(place: Path, path: str) -> None:
    """A run that a page speaks of and does not make: the second one there is a copy."""
    made = place / "runs" / "made"
    if not made.exists():
        chat = settings(model__init_from="model", data__source="chat.jsonl", data__format="chat")
        words = ["train", "config.toml", "--run", str(made), *chat, *settings(checkpoint__keep=9)]
        try:
            main(words)
        except SystemExit as ended:
            assert ended.code == 0, words
    if not (place / path).exists():
        shutil.copytree(made, place / path)
