"""The full campaign: 300 seeded faults of every kind in worlds of 1, 2 and 4 ranks, and what each kind cost.

As `shoal chaos examples/chaos.toml --faults 300`, kept as data. It takes a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import record

CONFIG = "examples/chaos.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1, help="for layouts with as many ranks on each")
    parser.add_argument("--json", type=Path, help="what an earlier campaign printed, to be kept")
    options = parser.parse_args()
    if options.json:
        found = json.loads(options.json.read_text())
    else:
        with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
            command = [sys.executable, "-m", "shoal", "chaos", CONFIG, "--json", "--run", f"{folder}/chaos"]
            command += ["--faults", str(options.faults), "--seed", str(options.seed)]
            command += ["--nodes", str(options.nodes)]
            found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    faults = found.pop("faults")
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
        faults=len(faults),
        seed=options.seed,
        nodes=options.nodes,
        points=sorted({fault["point"] for fault in faults}),
        worlds=sorted({fault["world"] for fault in faults}),
        in_recovery=sum(fault["in_recovery"] for fault in faults),
        kinds=kinds,
        **found,
    )


if __name__ == "__main__":
    main()
