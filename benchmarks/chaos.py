"""Campaigns of faults, kept as data: what each kind cost, and whether anything changed.

The full one, as `shoal chaos examples/chaos.toml --faults 300`, takes a quarter of an hour on two cores. Several seeds,
on a machine that others use as well: `benchmarks/chaos.py --faults 60 --seeds 0:10 --busy 4`. A row for every campaign,
also where the run did not survive; exit code 1 if one did not, or was not the same to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from record import record

CONFIG = "examples/chaos.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", help="several: 0:10 for 0 to 9")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the campaign")
    parser.add_argument("--nodes", type=int, default=1, help="for layouts with as many ranks on each")
    parser.add_argument("--json", type=Path, help="what an earlier campaign printed, to be kept")
    options = parser.parse_args()
    first, _, end = (options.seeds or f"{options.seed}:{options.seed + 1}").partition(":")
    failed = []
    for seed in range(int(first), int(end or int(first) + 1)):
        if options.json:
            found = json.loads(options.json.read_text())
        else:
            with busy(options.busy):
                found = campaign(options.faults, seed, options.nodes)
        keep(found, seed=seed, nodes=options.nodes, busy=options.busy)
        if not found["survived"]:
            failed.append(seed)
    if failed:
        sys.exit(f"did not survive, or not unchanged: seeds {', '.join(map(str, failed))}")


def campaign(faults: int, seed: int, nodes: int) -> dict[str, Any]:
    """What one printed; where it printed nothing, its last words."""
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
        command = [sys.executable, "-m", "shoal", "chaos", CONFIG, "--json", "--run", f"{folder}/chaos"]
        command += ["--faults", str(faults), "--seed", str(seed), "--nodes", str(nodes)]
        done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, Any] = {"faults": []}
    if done.stdout.strip():
        found = {**found, **json.loads(done.stdout)}
    return {**found, "survived": done.returncode == 0, "last_words": done.stderr.strip()[-500:]}


@contextmanager
def busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def keep(found: dict[str, Any], **asked: int) -> None:
    faults = found.pop("faults")
    if found.setdefault("survived", True):
        found.pop("last_words", None)
    kinds = {}
    for kind in dict.fromkeys(fault["kind"] for fault in faults):
        seconds = [fault["recovered_s"] for fault in faults if fault["kind"] == kind]
        kinds[kind] = {
            "faults": len(seconds),
            "median_s": statistics.median(seconds),
            "worst_s": max(seconds),
        }
    record(
        "chaos",
        load=os.getloadavg()[0],
        faults=len(faults),
        **asked,
        points=sorted({fault["point"] for fault in faults}),
        worlds=sorted({fault["world"] for fault in faults}),
        in_recovery=sum(fault["in_recovery"] for fault in faults),
        kinds=kinds,
        **found,
    )


if __name__ == "__main__":
    main()
