"""States of four times what a memory cgroup allows: steps with everything in files, and the same steps without a limit.

Needs root, for the cgroup, which also charges the page cache. Each run is a process of its own with one thread, which
builds the same step as training does: the limited one with ``offload=params@nvme``, the other with ``offload=params``,
which updates on the host as well, and has everything in memory.

With ``--train`` each run is a `shoal train`: its launcher and the server that workers are forked from are in the cgroup
too, and it ends with a commit.

python benchmarks/bounded_memory.py --scratch DIR
python benchmarks/bounded_memory.py --scratch DIR --train --steps 2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from blake3 import blake3
from record import record
from safetensors.torch import save_file

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.recipe import Recipe
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.direct_files import DirectFiles
from shoal.parallel.shards import weight
from shoal.train.data.loader import Batch
from shoal.train.files import read_rows
from shoal.train.program import assemble, blueprint
from shoal.train.step import Step

LAYOUTS = {"limited": "recompute=full,offload=params@nvme", "unlimited": "recompute=full,offload=params"}
GROUPS = Path("/sys/fs/cgroup")
STATES = 12  # bytes of a parameter: a master copy and two moments in fp32
TIMES = 4
SEQ = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path(), help="a directory of a disk")
    parser.add_argument(
        "--check", action="store_true", help="write no row: exit 1 where a bit of a loss or a weight differs"
    )
    parser.add_argument("--train", action="store_true", help="through `shoal train`")
    parser.add_argument("--run", choices=LAYOUTS, help="only this one, in this process: prints a row as JSON")
    options = parser.parse_args()
    if options.run:
        with TemporaryDirectory(dir=options.scratch) as scratch:
            print(json.dumps(measure(options, Path(scratch))))
        return
    parameters = sum(one.size for one in llama_parameters(network(options.layers)))
    limit = parameters * STATES // TIMES
    found = {}
    for run in LAYOUTS:
        with memory_group(limit if run == "limited" else None) as group:
            enter = partial(_write, group / "cgroup.procs", "0")
            found[run] = (trained if options.train else stepped)(options, run, enter)
            found[run]["most_bytes"] = most_charged(group)
    losses = [found[run].pop("losses") for run in LAYOUTS]
    weights = [found[run].pop("weights") for run in LAYOUTS]
    equal = losses[0] == losses[1] and weights[0] == weights[1]
    if options.check:
        print(json.dumps({"equal": equal, "limit_bytes": limit, **found}))
        sys.exit(0 if equal else 1)
    record(
        "bounded_memory",
        through="shoal train" if options.train else "one process's step",
        parameters=parameters,
        states_bytes=parameters * STATES,
        limit_bytes=limit,
        losses=losses[1],
        losses_equal=losses[0] == losses[1],
        weights_equal=weights[0] == weights[1],
        **found,
    )


def network(layers: int) -> Model:
    return Model(
        name="bounded", family="llama", layers=layers, hidden=512, heads=8, kv_heads=8, head_dim=64,
        ffn=2048, vocab=264, max_positions=SEQ, init_std=0.02,
    )  # fmt: skip


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    model, layout = network(options.layers), Layout.parse(LAYOUTS[options.run])
    recipe = Recipe(seq=SEQ, batch=1, steps=100, precision="fp32")
    files = DirectFiles(scratch) if layout.offload else None
    values = partial(fill, model=model, seed=0)
    mesh = Mesh(layout, 0, torch.device("cpu"))
    step = assemble(blueprint(model, recipe), recipe, TuneSection(), mesh, values, files=files)
    tokens = torch.arange(SEQ)[None] * 7 % model.vocab
    positions = torch.arange(SEQ)[None].contiguous()
    batch = Batch(tokens, tokens.roll(-1, 1), positions, None, torch.arange(1), SEQ)
    began, losses = time.perf_counter(), []
    for number in range(1, options.steps + 1):
        losses.append(step.issue(number, [batch], SEQ).read().loss)
    return {
        "layout": LAYOUTS[options.run],
        "step_s": (time.perf_counter() - began) / options.steps,
        "host_bytes": step.host_bytes,
        "nvme_bytes": files.content if files else 0,
        "losses": losses,
        "weights": digest(step),
    }


def stepped(options: argparse.Namespace, run: str, enter: Callable[[], None]) -> dict[str, Any]:
    """``measure`` in a process of its own, which begins by ``enter``."""
    command = [sys.executable, __file__, *sys.argv[1:], "--run", run]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


def trained(options: argparse.Namespace, run: str, enter: Callable[[], None]) -> dict[str, Any]:
    """By `shoal train`, whose processes are all in the group; of what it reads nothing is in memory before."""
    with TemporaryDirectory(dir=options.scratch) as name:
        place = Path(name)
        write_model(network(options.layers), place / "model")
        return train(options, run, place, enter)


def train(options: argparse.Namespace, run: str, place: Path, enter: Callable[[], None]) -> dict[str, Any]:
    model = place / "model"
    text = place / "text.txt"
    text.write_text(
        "\n\n".join(f"{number} squared is {number**2}." for number in range(2000)), encoding="utf-8"
    )
    values = {
        "model.path": model,
        "model.init_from": model,
        "cluster.on": "1xcpu",
        "data.source": text,
        "recipe.seq": SEQ,
        "recipe.batch": 1,
        "recipe.steps": options.steps,
        "recipe.precision": "fp32",
        "evaluate.every": 0,
        "evaluate.batches": 0,
        "evaluate.samples": 0,
    }
    command = [sys.executable, "-m", "shoal", "train", "--run", str(place / "run")]
    command += ["--layout", LAYOUTS[run]]
    command += [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr, preexec_fn=enter)
    taken = time.perf_counter() - began
    rows = read_rows(place / "run" / "metrics.jsonl")
    manifest = place / "run" / "checkpoints" / f"step-{options.steps:08d}" / "manifest.json"
    pieces = json.loads(manifest.read_text(encoding="utf-8"))["pieces"]
    return {
        "layout": LAYOUTS[run],
        "run_s": taken,
        "step_s": rows[-1]["step_s"],
        "losses": [row["loss"] for row in rows],
        "weights": blake3("".join(piece["hash"] for piece in pieces).encode()).hexdigest(),
    }


def write_model(model: Model, folder: Path) -> None:
    """Any weights, as a file: Shoal's own first ones take longer to compute than all else here."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(0)
    for layer in (*range(model.layers), None):
        weights = {}
        for one in llama_parameters(model):
            if one.layer == layer:
                drawn = torch.randn(one.shape, generator=draw) * model.init_std
                weights[one.name] = torch.ones(one.shape) if len(one.shape) == 1 else drawn
        save_file(weights, file := folder / f"model-{layer}.safetensors")
        with file.open("rb") as written:
            os.fsync(written.fileno())
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (folder / "config.json").write_text(json.dumps(as_huggingface(model)), encoding="utf-8")


def as_huggingface(model: Model) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_positions,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
    }


def digest(step: Step) -> str:
    """Of every bit of the weights that the optimizer updates."""
    step.settle()
    found = blake3()
    for piece in step.pieces:
        found.update(weight(piece).detach().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


@contextmanager
def memory_group(limit: int | None) -> Iterator[Path]:
    """A memory cgroup of either version, of one process of ours."""
    first = (GROUPS / "memory").is_dir()
    group = GROUPS / ("memory" if first else "") / f"shoal-{os.getpid()}"
    group.mkdir()
    try:
        if limit is not None:
            (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
            swap = group / ("memory.memsw.limit_in_bytes" if first else "memory.swap.max")
            if swap.exists():
                swap.write_text(str(limit if first else 0))
        yield group
    finally:
        group.rmdir()


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def most_charged(group: Path) -> int:
    """The most memory that it ever had, page cache included."""
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return next(int((group / name).read_text()) for name in names if (group / name).exists())


if __name__ == "__main__":
    main()
