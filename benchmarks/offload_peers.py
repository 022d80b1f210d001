"""Offload to the host and to files beside DeepSpeed's ZeRO-Offload and ZeRO-Infinity, in turns in one run.

Both begin with the same weights, read the same rows, and are timed by `shoal bench step`: medians of steps, then of
rounds. Memory is the most that each process had in a turn, torch and other libraries included.

DeepSpeed has to be there; for `@nvme` its asynchronous I/O too, which it builds where libaio's headers are:

    apt-get install libaio-dev
    python -m venv peers && peers/bin/pip install torch==2.13.0 deepspeed==0.19.8 setuptools ninja py-cpuinfo -e .
    PATH=$PWD/peers/bin:$PATH peers/bin/python benchmarks/offload_peers.py --scratch DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from record import record

from shoal.cli.bench_step import FIXED
from shoal.facts.config.file import load
from shoal.plan.resolve import resolve
from shoal.prove.bench.measure import measure
from shoal.prove.bench.registry import PEERS

LAYOUTS = "offload=optimizer;offload=optimizer@nvme;offload=params@nvme"
MODEL = Path(__file__).parent / "data" / "two_cores_offload.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scratch", type=Path, required=True, help="a directory of a disk")
    options = parser.parse_args()
    for layout in options.layouts.split(";"):
        settings = {
            **FIXED,
            "model.path": options.model,
            "cluster.on": "local",
            "recipe.seq": options.seq,
            "recipe.batch": options.batch,
            "recipe.precision": "bf16",
            "offload.scratch": options.scratch.absolute(),
        }
        job = resolve(load(None, [f"{key}={value}" for key, value in settings.items()], layout).config)
        kinds = [PEERS["shoal"], PEERS["deepspeed"]]
        found = measure(
            job, kinds, options.rounds, options.steps, 2, lambda line: print(line, file=sys.stderr)
        )
        row = found.document()
        wanted = ("versions", "failure", "step_s", "step_s_by_round", "peak_resident", "losses")
        record(
            "offload_peers",
            parameters=row["parameters"],
            layout=layout,
            seq=options.seq,
            batch=options.batch,
            precision="bf16",
            peers={one["name"]: {name: one.get(name) for name in wanted} for one in row["peers"]},
            losses_agree=[one.get("agrees") for one in row["peers"]],
            shoal_over_deepspeed=row["peers"][1].get("shoal_over_this"),
            shoal_over_deepspeed_95=row["peers"][1].get("shoal_over_this_95"),
        )


if __name__ == "__main__":
    main()
