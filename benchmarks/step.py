"""A training step of ``shoal train``, as the run itself recorded it: the median of the steps after the first few."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from record import record

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--layout", default="dp=1")
    parser.add_argument("set", nargs="*", help="as in recipe.batch=8")
    options = parser.parse_args()
    fixed = [
        "checkpoint.every=0",
        "evaluate.batches=0",
        "evaluate.samples=0",
        f"recipe.steps={options.steps}",
    ]
    with TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        sets = [word for value in (*fixed, *options.set) for word in ("--set", value)]
        command = [
            sys.executable,
            "-m",
            "shoal",
            "train",
            "--run",
            str(run),
            "--layout",
            options.layout,
            *sets,
        ]
        subprocess.run(command, check=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    record(
        "step",
        layout=options.layout,
        set=options.set,
        steps=len(rows),
        step_s=statistics.median(row["step_s"] for row in rows),
        tokens_per_s=statistics.median(row["tokens_per_s"] for row in rows),
        model_tflops=statistics.median(row["model_flops_per_s"] for row in rows) / 1e12,
        mfu=rows[-1]["mfu"],
        memory_peak_gib=rows[-1]["memory_peak"] / 2**30,
    )


if __name__ == "__main__":
    main()
