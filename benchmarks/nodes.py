"""Two nodes at one run, each a launcher of its own on this machine: a rank, a node, the leader are lost and come back.

Nodes that share one machine say what works and how soon others notice, not how fast a network is. On a GPU their NCCL
ranks share it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.launch.nodes.processes import Nodes  # noqa: E402 the tests' own nodes

VALUES = {
    "model.path": ROOT / "examples" / "small.json",
    "recipe.seq": 32,
    "recipe.batch": 8,
    "recipe.steps": 90_000,
    "evaluate.every": 0,
    "checkpoint.every": 90_000,
    "checkpoint.memory": 1,
    "cluster.share": "true",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", default="local", help="as in cluster.on")
    parser.add_argument("--timeout", type=float, default=6.0, help="fault.timeout, seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-nodes-") as folder:
        values = {
            **VALUES,
            "cluster.on": options.on,
            "fault.timeout": options.timeout,
            "data.cache": f"{folder}/cache",
        }
        nodes = Nodes(
            Path(folder) / "run", "1:2", "dp=2", [f"{key}={value}" for key, value in values.items()]
        )
        try:
            measured = measure(nodes)
        finally:
            nodes.end()
    record("nodes", layout="dp=2", nodes=2, timeout_s=options.timeout, **measured)


def measure(nodes: Nodes) -> dict[str, Any]:
    """Seconds from each loss to a step that is done without what was lost, or with it again."""
    first, second = nodes.start("a"), nodes.start("b")
    started = seconds(lambda: nodes.wait_for_world(2))
    nodes.wait_for_steps(5)
    led, follows = (first, second) if "led from" in second.words() else (second, first)

    os.kill(nodes.rank(1), signal.SIGKILL)
    rank = seconds(lambda: (nodes.wait_for_fault("killed"), nodes.wait_for_steps(2)))
    follows.lose()
    node = seconds(lambda: (nodes.wait_for_fault("node lost"), nodes.wait_for_world(1)))
    follows.start()
    back = seconds(lambda: nodes.wait_for_world(2))
    nodes.wait_for_steps(3)
    led.lose()
    leader = seconds(lambda: (nodes.wait_for_fault("launcher lost"), nodes.wait_for_world(1)))
    led.start()
    nodes.wait_for_world(2)
    nodes.wait_for_steps(3)
    os.kill(led.process.pid, signal.SIGTERM)
    codes = [first.code(), second.code()]
    steps = [row["step"] for row in nodes.rows()]
    return {
        "started_s": started,
        "rank_s": rank,
        "node_s": node,
        "back_s": back,
        "leader_s": leader,
        "exit_codes": codes,
        "each_step_once": steps == list(range(1, len(steps) + 1)),
        "steps": len(steps),
        "told": [row.get("message", row["kind"]) for row in nodes.faults()],
    }


def seconds(what: Callable[[], object]) -> float:
    began = time.monotonic()
    what()
    return time.monotonic() - began


if __name__ == "__main__":
    main()
