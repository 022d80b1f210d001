"""States at rest and how they are rounded: the validation loss of runs of the embedded default, side by side.

python benchmarks/states.py --steps 200 --lr 1e-2 1e-3
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from record import record

KINDS: dict[str, dict[str, str]] = {
    "fp32": {"recipe.states": "fp32"},
    "bf16 nearest": {"recipe.states": "bf16", "recipe.rounding": "nearest"},
    "bf16 stochastic": {"recipe.states": "bf16", "recipe.rounding": "stochastic"},
    "int8 nearest": {"recipe.states": "int8", "recipe.rounding": "nearest"},
    "int8 stochastic": {"recipe.states": "int8", "recipe.rounding": "stochastic"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-2, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    options = parser.parse_args()
    for lr in options.lr:
        for seed in options.seeds:
            for kind in options.kinds:
                recipe = {"steps": options.steps, "batch": options.batch, "lr": lr, "seed": seed}
                settings = {f"recipe.{key}": value for key, value in recipe.items()} | KINDS[kind]
                record("states", kind=kind, **recipe, **loss(settings))


def loss(settings: dict[str, Any]) -> dict[str, Any]:
    """Of a run as ``shoal train`` runs it, in one process; it computes in fp32, so that states alone differ."""
    with TemporaryDirectory() as directory:
        all_settings = {
            **settings,
            "layout": "dp=1",
            "recipe.precision": "fp32",
            "checkpoint.every": 0,
            "evaluate.every": settings["recipe.steps"],
            "evaluate.batches": 32,
            "evaluate.samples": 0,
            "run.dir": directory,
        }
        words = [word for key, value in all_settings.items() for word in ("--set", f"{key}={value}")]
        subprocess.run([sys.executable, "-m", "shoal", "train", *words], check=True, stdout=sys.stderr)
        (metrics,) = Path(directory).rglob("metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "validation_loss": rows[-1]["heldout_loss"],
        "training_loss": statistics.mean(row["loss"] for row in rows[-20:]),
        "step_s": statistics.median(row["step_s"] for row in rows),
    }


if __name__ == "__main__":
    main()
