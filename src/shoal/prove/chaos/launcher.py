"""A launcher in its own process, like ``shoal train``: ``python -m shoal.prove.chaos.launcher JSON``.

It starts the same as ``shoal train``, plus an observer in every rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from shoal.facts.config.file import load
from shoal.launch import local
from shoal.launch.nodes import train as on_nodes
from shoal.launch.nodes.count import NodeCount
from shoal.launch.redacted import redact_output
from shoal.plan.resolve import resolve
from shoal.prove.chaos.network import own_network
from shoal.train.run_directory import RunDirectory

ENTRYPOINT = "shoal.prove.chaos.saboteur:sabotaged"


def main(given: str) -> int:
    asked = json.loads(given)
    if asked["own_network"]:
        own_network()
    config = Path(asked["config"]) if asked["config"] else None
    nodes = asked["nodes"]
    job = resolve(load(config, asked["settings"], asked["layout"]).config, nodes=nodes)
    console = Console(file=sys.stderr, width=200)
    run = RunDirectory(Path(asked["run"]), asked["node"])
    if nodes > 1:
        count = NodeCount(nodes, nodes)
        report = on_nodes.train(job, run, count, False, console, entrypoint=ENTRYPOINT)
    else:
        report = local.train(job, run, False, console, entrypoint=ENTRYPOINT)
    print(report.message, file=sys.stderr)
    return report.code


if __name__ == "__main__":
    redact_output()
    sys.exit(main(sys.argv[1]))
