"""What Shoal says and does, recorded before a change and compared after it: the safety net of a redesign.

    python benchmarks/snapshot.py record            # before
    python benchmarks/snapshot.py compare           # after every slice; exit code 1 where a figure differs
    python benchmarks/snapshot.py compare --only plans dryruns

Four parts, all through the public surface (library, command line, files of a run), for all else is going to change:

- plans: predictions for seeded random workloads over every axis, LoRA, experts and offload, and for some of them the
  whole search;
- dryruns: counted memory and traffic of one rank;
- runs: the losses of short runs, to the bit;
- resume: a run directory that was written at the time of recording, which has to go on to the recorded losses.

Figures (numbers, layouts, traffic) have to be equal. Sentences may be rewritten: how many were is printed, and
``--sentences`` shows them. Losses are equal to the bit on one kind of processor only; the recorded one is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import math
import platform
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from record import commit

import shoal
from shoal.cli.main import main as command_line
from shoal.facts.problem import BadInput

HERE = Path(__file__).parent / "data" / "snapshot"
WORKLOADS, SEARCHED_EVERY = 500, 8
# Fields that documents have had since the recording.
ADDED = ("proven",)
MODELS = [
    "tiny",
    "gpt2",
    "gpt2-xl",
    "llama2-13b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "llama3.2-1b",
    "mistral-7b",
    "qwen2-7b",
    "qwen3-8b",
    "pythia-6.9b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v3",
    "gpt3-175b",
]
DEVICES = ("H100", "H200", "A100-80GB", "cpu")
# Answers that are a matter of the clock.
TIMED = {"seconds_searched", "search_s"}

DRYRUN_LAYOUTS = [
    "dp=1",
    "dp=4",
    "dp=2,micro=1",
    "fsdp=4",
    "fsdp=2,zero=1",
    "fsdp=2,zero=2",
    "fsdp=4,unit=2",
    "dp=2,fsdp=2",
    "dp=2,fsdp=2,zero=1",
    "dp=2,fsdp=2,zero=2",
    "fsdp=2,recompute=full",
    "fsdp=2,recompute=selective",
    "tp=2",
    "tp=4",
    "tp=2,sp=0",
    "tp=4,recompute=full",
    "tp=2,recompute=selective",
    "pp=2",
    "pp=4,recompute=full",
    "pp=2,schedule=gpipe",
    "pp=2,schedule=zb",
    "pp=2,schedule=interleaved",
    "pp=2,schedule=zbv",
    "pp=2,schedule=dualpipev",
    "dp=2,tp=2",
    "dp=2,pp=2",
    "fsdp=2,tp=2",
    "fsdp=2,zero=2,tp=2",
    "fsdp=2,pp=2",
    "fsdp=2,zero=1,pp=2,schedule=zb",
    "tp=2,pp=2",
    "tp=2,pp=2,schedule=zbv",
    "dp=2,fsdp=2,tp=2",
    "dp=2,tp=2,pp=2",
    "fsdp=2,tp=2,pp=2",
    "fsdp=2,zero=2,tp=2,pp=2,schedule=interleaved",
    "dp=2,fsdp=2,pp=2,schedule=dualpipev",
    "fsdp=8,micro=1",
    "tp=8",
    "pp=8,micro=1",
]
DRYRUN_MODELS = ("llama3.2-1b", "gpt2", "qwen3-8b", "mistral-7b")

# Layout and further settings of a short run of the tiny model.
RUNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dp=1", ()),
    ("dp=1", ("recipe.precision=bf16", "recipe.dropout=0.1")),
    ("dp=2", ("recipe.precision=fp16",)),
    ("dp=2,micro=1", ("run.strict=true",)),
    ("fsdp=2", ("recipe.precision=bf16",)),
    ("fsdp=2,zero=1", ("recipe.optimizer=sgd",)),
    ("fsdp=2,zero=2,recompute=full", ("recipe.states=bf16",)),
    ("dp=2,fsdp=2", ()),
    ("tp=2", ("data.packing=true",)),
    ("tp=2,sp=0,recompute=selective", ("recipe.precision=bf16",)),
    ("pp=2,schedule=zb", ()),
    ("fsdp=2,pp=2,schedule=interleaved", ("recipe.precision=bf16",)),
)
STEPS, KEPT = 6, 3
# Python 3.12 adds floats more carefully than 3.11.
CLOSE = 1e-9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--sentences", action="store_true", help="show sentences that were rewritten")
    options = parser.parse_args()
    HERE.mkdir(parents=True, exist_ok=True)
    if options.what == "record":
        for name in options.only:
            write(name, {"commit": commit(), "machine": machine(), "found": PARTS[name](None)})
        return
    equal = True
    for name in options.only:
        before = read(name)
        print(f"{name}: as recorded at {before['commit']} on {before['machine']}", flush=True)
        equal &= compare(before["found"], PARTS[name](before["found"]), options.sentences)
    sys.exit(0 if equal else 1)


# Plans.


def plans(before: dict[str, Any] | None) -> dict[str, Any]:
    """By the workload: what is predicted of its layout, and for some what a search chooses."""
    found: dict[str, Any] = {}
    for workload in [*before] if before else drawn():
        asked = json.loads(workload)
        found[workload] = without_clock(shoal.plan(**asked).as_json())
        if len(found) % 50 == 0:
            print(f"  {len(found)} workloads", flush=True)
    return found


def drawn() -> Iterator[str]:
    """Legal workloads. Of the recorded ones the text is kept, so what is legal later does not matter."""
    count, draw = 0, random.Random(14)
    while count < WORKLOADS:
        asked = draw_one(draw)
        with contextlib.suppress(BadInput):
            shoal.plan(**asked)
            count += 1
            yield json.dumps(asked)
            if count % SEARCHED_EVERY == 0:
                yield json.dumps({**asked, "layout": None})


def draw_one(draw: random.Random) -> dict[str, Any]:
    def some(probability: float, value: Callable[[], str]) -> str:
        return value() if draw.random() < probability else ""

    def power(most: int) -> int:
        return 2 ** draw.randint(0, most)

    model = draw.choice(MODELS)
    experts = model in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
    keys = {
        "dp": str(power(3)),
        "fsdp": some(0.6, lambda: str(power(5))),
        "zero": some(0.4, lambda: draw.choice("123")),
        "unit": some(0.15, lambda: draw.choice("24")),
        "tp": some(0.5, lambda: str(power(3))),
        "sp": some(0.1, lambda: "0"),
        "cp": some(0.2, lambda: str(power(2))),
        "cp_kind": some(0.1, lambda: "ulysses"),
        "pp": some(0.4, lambda: str(power(3))),
        "schedule": some(0.4, lambda: draw.choice(["gpipe", "interleaved", "zb", "zbv", "dualpipev"])),
        "ep": some(0.7 if experts else 0.0, lambda: str(power(3))),
        "micro": some(0.5, lambda: str(power(2))),
        "recompute": some(0.6, lambda: draw.choice(["selective", "full"])),
        "offload": some(
            0.2, lambda: draw.choice(["optimizer", "optimizer+params", "optimizer:0.5", "params@nvme"])
        ),
    }
    layout = ",".join(f"{key}={value}" for key, value in keys.items() if value)
    world = 1
    for axis in ("dp", "fsdp", "tp", "cp", "pp"):
        world *= int(keys[axis] or 1)
    device = draw.choice(DEVICES)
    per_node = min(world, 8)
    nodes = f"{world // per_node}x" if world > per_node else ""
    data = int(keys["dp"]) * int(keys["fsdp"] or 1) * int(keys["micro"] or 1)
    return {
        "model": model,
        "on": f"{nodes}{per_node}x{device}",
        "layout": layout,
        "seq": 2 ** draw.randint(8, 13),
        "batch": data * draw.choice([1, 2, 4, 8, 16]),
        "lora": draw.choice([None, None, None, 8, 64]),
        "precision": draw.choice(["bf16", "bf16", "fp32", "fp16"]),
        "states": draw.choice(["fp32", "fp32", "bf16"]),
        "optimizer": draw.choice(["adamw", "adamw", "sgd"]),
    }


def without_clock(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in TIMED and key != "seconds"}


# Dry runs.


def dryruns(before: dict[str, Any] | None) -> dict[str, Any]:
    found = {}
    for number, layout in enumerate(DRYRUN_LAYOUTS):
        model = DRYRUN_MODELS[number % len(DRYRUN_MODELS)]
        world = 1
        for pair in layout.split(","):
            key, _, value = pair.partition("=")
            world *= int(value) if key in ("dp", "fsdp", "tp", "pp") else 1
        words = [
            model,
            "--on",
            f"{world}xH100",
            "--seq",
            "1024",
            "--batch",
            "16",
            "--layout",
            layout,
            "--json",
        ]
        out = io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(SystemExit),
        ):
            command_line(["dryrun", *words])
        found[f"{model} {layout}"] = without_clock(json.loads(out.getvalue()))
    return found


# Runs.


def runs(before: dict[str, Any] | None) -> dict[str, Any]:
    found = {}
    with TemporaryDirectory() as folder:
        for number, (layout, settings) in enumerate(RUNS):
            run = Path(folder) / str(number)
            train(run, layout, settings)
            found[" ".join((layout, *settings))] = losses(run)
            print(f"  {layout}", flush=True)
    return found


def resume(before: dict[str, Any] | None) -> dict[str, Any]:
    """The recorded run, with its first checkpoints alone, goes on in another layout. Strict, so to the same bits."""
    archive = HERE / "run.tar.xz"
    strict = ("run.strict=true", "recipe.dropout=0.1", "checkpoint.every=1", f"checkpoint.keep={STEPS}")
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if before is None:
            train(run, "dp=2", strict)
            for checkpoint in (run / "checkpoints").iterdir():
                if checkpoint.name != f"step-{KEPT:08d}":
                    shutil.rmtree(checkpoint)
            with tarfile.open(archive, "w:xz") as file:
                file.add(run, "run")
        else:
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
        train(run, "fsdp=2", strict)
        return {"losses": losses(run)}


def train(run: Path, layout: str, settings: tuple[str, ...]) -> None:
    """Short, on the example's data; the tokenised copy of it is the run's own neighbour."""
    values = {
        "model.path": HERE / "model",
        "recipe.steps": STEPS,
        "recipe.seq": 32,
        "recipe.batch": 8,
        "recipe.warmup": 2,
        "evaluate.every": 0,
        "data.cache": run.parent / "cache",
        "cluster.on": "1xcpu",
        "cluster.share": "true",
    }
    words = [f"{key}={value}" for key, value in values.items()] + [*settings]
    example = Path(__file__).parent.parent / "examples" / "tiny.toml"
    command = [sys.executable, "-m", "shoal", "train", str(example), "--layout", layout, "--run", str(run)]
    subprocess.run(
        [*command, *(part for word in words for part in ("--set", word))], check=True, capture_output=True
    )


def losses(run: Path) -> list[str]:
    return [json.loads(line)["loss_hex"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# Recorded and found.

PARTS: dict[str, Callable[[dict[str, Any] | None], dict[str, Any]]] = {
    "plans": plans,
    "dryruns": dryruns,
    "runs": runs,
    "resume": resume,
}


def compare(before: dict[str, Any], after: dict[str, Any], sentences: bool) -> bool:
    """What differs, an entry a line, with its first figure that does."""
    rewritten: list[str] = []
    different = 0
    for entry in [*before, *(entry for entry in after if entry not in before)]:
        figures: list[str] = []
        for where, one, other in differences("", before.get(entry), after.get(entry)):
            is_sentence = isinstance(one, str) and " " in one and isinstance(other, str)
            (rewritten if is_sentence else figures).append(f"{where}: {one!r} → {other!r}")
        different += bool(figures)
        if figures:
            print(f"  {entry}\n    {len(figures)} figures, such as{figures[0][:300]}")
    if sentences:
        print("\n".join(f"   {one}" for one in rewritten))
    print(f"  {different} of {len(before)} differ; {len(rewritten)} sentences were rewritten", flush=True)
    return not different


def differences(where: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one and key not in ADDED)]:
            yield from differences(f"{where} / {key}", one.get(key), other.get(key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(f"{where}[{number}]", *pair)
    elif isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=CLOSE):
        return
    elif one != other:
        yield where, one, other


def machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def write(name: str, document: dict[str, Any]) -> None:
    partial = HERE / f"{name}.partial"
    partial.write_bytes(lzma.compress(json.dumps(document).encode()))
    shutil.move(partial, HERE / f"{name}.json.xz")


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(lzma.decompress((HERE / f"{name}.json.xz").read_bytes()))
    return document


if __name__ == "__main__":
    main()
