"""fp8 beside bf16 on this machine's device: steps of a preset, and the validation loss of runs on Python sources.

python benchmarks/fp8.py speed llama3.2-1b --batch 8
python benchmarks/fp8.py loss llama3.2-1b --batch 8 --steps 500
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from record import record

from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.train.data.loader import Batch
from shoal.train.program import BACKEND, assemble, blueprint

WARM_UP, STEPS = 4, 10
# Sizes of documents, so that none is a stub or a table, and of all of them.
DOCUMENT, CORPUS = range(2_000, 100_000), 40_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "loss"])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--states", default="fp32")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kinds", nargs="+", default=["bf16", "tensorwise", "rowwise"])
    options = parser.parse_args()
    measure = speed if options.what == "speed" else loss
    for kind in options.kinds:
        found = measure(
            options, {"precision": "bf16"} if kind == "bf16" else {"precision": "fp8", "fp8": kind}
        )
        record("fp8", what=options.what, model=options.model, batch=options.batch, kind=kind, **found)


def speed(options: argparse.Namespace, kind: dict[str, Any]) -> dict[str, Any]:
    """A step of compiled blocks, from host to host; median."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model = PRESETS[options.model]
    recipe = Recipe(seq=options.seq, batch=options.batch, steps=100, states=options.states, **kind)
    network, mesh = blueprint(model, recipe), Mesh(Layout(), 0, device)
    values, backend = partial(fill, model=model, seed=0), BACKEND if on_gpu else None
    step = assemble(network, recipe, TuneSection(), mesh, values, compile_with=backend)
    tokens = torch.randint(0, model.vocab, (options.batch, options.seq), device=device)
    positions = torch.arange(options.seq, device=device).expand_as(tokens).contiguous()
    rows = torch.arange(options.batch, device=device)
    batch = Batch(tokens, tokens.roll(-1, 1), positions, None, rows, tokens.numel())
    taken = []
    for number in range(1, WARM_UP + STEPS + 1):
        began = time.perf_counter()
        step(number, [batch], tokens.numel())  # it returns numbers that the device has come to
        taken.append(time.perf_counter() - began)
    seconds = statistics.median(taken[WARM_UP:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    compiled = step.placed.compiled
    return {
        "step_s": seconds,
        "tokens_per_s": tokens.numel() / seconds,
        "peak_gib": peak,
        "not_compiled": None if compiled is None else compiled.problem,
    }


def loss(options: argparse.Namespace, kind: dict[str, Any]) -> dict[str, Any]:
    """The validation loss of a run, as ``shoal train`` runs it, on the sources of the packages beside torch."""
    with TemporaryDirectory() as directory:
        home = Path(directory)
        write_sources(home / "sources.jsonl")
        settings = {
            "model.preset": options.model,
            "data.source": home / "sources.jsonl",
            "data.cache": home / "cache",
            "recipe.seq": options.seq,
            "recipe.batch": options.batch,
            "recipe.steps": options.steps,
            "recipe.states": options.states,
            "recipe.lr": 3e-4,
            "recipe.warmup": options.steps // 10,
            "checkpoint.every": 0,
            "evaluate.every": max(1, options.steps // 5),
            "evaluate.batches": 8,
            "evaluate.samples": 0,
            "run.dir": home / "runs",
            **{f"recipe.{key}": value for key, value in kind.items()},
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        subprocess.run([sys.executable, "-m", "shoal", "train", *words], check=True)
        (metrics,) = (home / "runs").rglob("metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    heldout = {row["step"]: row["heldout_loss"] for row in rows if row.get("heldout_loss") is not None}
    return {
        "steps": options.steps,
        "first_grad_norm": rows[0]["grad_norm"],
        "validation_loss": heldout,
        "step_s": statistics.median(row["step_s"] for row in rows),
    }


def write_sources(path: Path) -> None:
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(torch.__file__).parents[1].rglob("*.py")):
            text = source.read_text(encoding="utf-8", errors="ignore")
            if len(text) in DOCUMENT:
                file.write(json.dumps({"text": text}) + "\n")
                size += len(text)
            if size > CORPUS:
                return


if __name__ == "__main__":
    main()
