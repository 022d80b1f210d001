"""Offload to the host and to files beside DeepSpeed's ZeRO-Offload and ZeRO-Infinity, in turns in one run.

Both begin with the same weights, read the same rows, use as many threads and the same disk without its cache, and are
timed by `shoal bench step`: medians of steps, then of rounds. Beside each stand the processor seconds of a step, which
hardly depend on what else the machine does. Memory is the most that each process had resident in a turn, and what its
libraries take before there is a model. Losses are compared over all steps.

DeepSpeed has to be there; for `@nvme` its asynchronous I/O too, which it compiles at first use, for some minutes, where
libaio's headers are:

    apt-get install libaio-dev
    python -m venv peers && peers/bin/pip install torch==2.13.0 deepspeed==0.19.8 setuptools ninja py-cpuinfo -e .
    PATH=$PWD/peers/bin:$PATH peers/bin/python benchmarks/offload_peers.py --scratch DIR
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from statistics import median

from record import record

from shoal.cli.bench_step import FIXED
from shoal.facts.cluster.this_machine import usable_threads
from shoal.facts.config.file import load
from shoal.launch.init_rank import thread_count
from shoal.plan.resolve import Job, resolve
from shoal.prove.bench.measure import measure
from shoal.prove.bench.registry import PEERS
from shoal.prove.bench.result import PeerResult

LAYOUTS = "offload=optimizer;offload=optimizer@nvme;offload=params@nvme"
MODEL = Path(__file__).parent / "data" / "two_cores_offload.json"
WARM_UP = 2
# What each process imports before it makes a model.
IMPORTS = {
    "shoal": "shoal.prove.bench.rank, shoal.prove.bench.peers.shoal_train",
    "deepspeed": "shoal.prove.bench.rank, shoal.prove.bench.peers.deepspeed_offload, deepspeed.ops.adam",
}
RESIDENT = "[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmRSS:')][0]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scratch", type=Path, required=True, help="a directory of a disk")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    libraries = {name: resident_after(modules) for name, modules in IMPORTS.items()}
    for layout in options.layouts.split(";"):
        job = job_of(layout, options)
        found = measure(
            job,
            [PEERS[name] for name in IMPORTS],
            options.rounds,
            options.steps,
            WARM_UP,
            lambda line: print(line, file=sys.stderr),
        )
        ours, theirs = found.results
        ratio = found.ratio(theirs) if ours.failure is None and theirs.failure is None else None
        record(
            "offload_peers",
            parameters=found.document()["parameters"],
            layout=layout,
            seq=options.seq,
            batch=options.batch,
            precision="bf16",
            threads={"compute": thread_count(job, 1), "update": usable_threads()},
            load=os.getloadavg()[0],
            peers={one.name: row_of(one, libraries[one.name]) for one in found.results},
            steps_compared=min(len(ours.all_losses), len(theirs.all_losses)),
            largest_loss_difference=largest_difference(ours, theirs),
            shoal_over_deepspeed=None if ratio is None else ratio[0],
            shoal_over_deepspeed_95=None if ratio is None else ratio[1:],
        )


def job_of(layout: str, options: argparse.Namespace) -> Job:
    settings = {
        **FIXED,
        "model.path": options.model,
        "cluster.on": "local",
        "recipe.seq": options.seq,
        "recipe.batch": options.batch,
        "recipe.precision": "bf16",
        "offload.scratch": options.scratch.absolute(),
    }
    return resolve(load(None, [f"{key}={value}" for key, value in settings.items()], layout).config)


def resident_after(modules: str) -> int:
    """Resident bytes of a fresh process that has imported these modules."""
    command = [sys.executable, "-c", f"import {modules}; print({RESIDENT})"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(lines[-1]) * 1024


def row_of(peer: PeerResult, libraries: int) -> dict[str, object]:
    if peer.failure is not None:
        return {"versions": peer.versions, "failure": peer.failure}
    return {
        "versions": peer.versions,
        "failure": None,
        "step_s": peer.step_s,
        "step_s_by_round": peer.rounds,
        "processor_s": median(chain(*peer.processor)),
        "peak_resident": peer.peak_resident,
        "resident_with_libraries": libraries,
        "losses": peer.all_losses,
    }


def largest_difference(ours: PeerResult, theirs: PeerResult) -> float | None:
    """The largest relative difference of two losses of the same step, from the first step on."""
    pairs = zip(ours.all_losses, theirs.all_losses, strict=False)
    return max((abs(one - other) / abs(other) for one, other in pairs), default=None)


if __name__ == "__main__":
    main()
