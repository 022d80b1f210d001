"""Over a slow link between two hosts: the order in which the planner ranks layouts, and the order measured.

    python benchmarks/shaped_link.py            # as root; some minutes

Two namespaces of the network stand for two hosts, and what leaves either passes at 200 Mbit/s. ``shoal bench comm``
under torchrun measures the link; ``shoal plan`` prices layouts with what it stored; ``shoal train`` under torchrun runs
each. One rank on each host. Appends to benchmarks/results/shaped_link.jsonl; exit code 1 where the orders differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.launch.adopt.ranks import free_port  # noqa: E402 found from here
from tests.launch.namespaces import joined, shape, torchrun  # noqa: E402

from shoal.train.files import read_rows  # noqa: E402

NETWORK, RATE = "10.80.0", "200mbit"
LAYOUTS = ("pp=2", "tp=2", "dp=2", "fsdp=2")
SEQ, BATCH, STEPS, WARM_UP = 32, 4, 7, 2
# Few tokens for its weights, so that the link decides and not what else the machine does.
MODEL = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 2048}
ON = "2x1xcpu"
SECONDS = 900
BOTH = ("predicted_s", "measured_s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default=RATE, help="of the link, as tc has it")
    rate = parser.parse_args().rate
    with tempfile.TemporaryDirectory(prefix="shoal-link-") as folder, joined("ab", NETWORK) as machines:
        for name in machines.values():
            shape(name, rate)
        hosts = _Hosts(Path(folder), [*machines.values()])
        link = hosts.measured_link()
        layouts = [
            {"layout": layout, "predicted_s": hosts.predicted(layout), "measured_s": hosts.measured(layout)}
            for layout in LAYOUTS
        ]
    orders = [[one["layout"] for one in sorted(layouts, key=lambda one: one[by])] for by in BOTH]
    facts = {"model": MODEL, "seq": SEQ, "batch": BATCH, "steps": STEPS}
    record("shaped_link", rate=rate, link=link, **facts, layouts=layouts, same_order=orders[0] == orders[1])
    sys.exit(orders[0] != orders[1])


class _Hosts:
    """Two hosts with one rank each, and a folder that both see."""

    def __init__(self, folder: Path, machines: Sequence[str]) -> None:
        from shoal.facts.model.huggingface import write_config
        from shoal.facts.model.presets import PRESETS

        self.folder, self.machines = folder, machines
        self.model = folder / "model" / "config.json"
        self.model.parent.mkdir()
        narrow = PRESETS["tiny"].model_copy(update={"name": "narrow", **MODEL})
        self.model.write_text(json.dumps(write_config(narrow)))
        self.environment = {
            **os.environ,
            "SHOAL_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "src"),
        }

    def measured_link(self) -> dict[str, Any]:
        """What ``bench comm`` has stored for the planner."""
        words = ["bench", "comm", "--on", "2xcpu", "--sizes", "4K,1M,8M", "--json"]
        told = self._torchrun([*words, "--operations", "send,all_reduce,all_gather,reduce_scatter"])
        found: dict[str, Any] = json.loads(told)["rates"]
        return found

    def predicted(self, layout: str) -> float:
        words = [
            "--on",
            ON,
            "--seq",
            str(SEQ),
            "--batch",
            str(BATCH),
            "--precision",
            "fp32",
            "--layout",
            layout,
        ]
        command = [sys.executable, "-m", "shoal", "plan", str(self.model), *words, "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=self.environment)
        (plan,) = json.loads(done.stdout)["plans"]
        return float(plan["step"]["seconds"])

    def measured(self, layout: str) -> float:
        """The median step."""
        run = self.folder / layout
        values = {
            "model.path": self.model,
            **{"recipe.seq": SEQ, "recipe.batch": BATCH, "recipe.steps": STEPS, "recipe.precision": "fp32"},
            **{"evaluate.every": 0, "checkpoint.every": 0, "cluster.on": ON},
        }
        sets = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        self._torchrun(["train", "--run", str(run), "--layout", layout, *sets])
        rows = read_rows(run / "metrics.jsonl")
        return statistics.median(row["step_s"] for row in rows[WARM_UP:])

    def _torchrun(self, words: list[str]) -> str:
        """What the first rank has printed."""
        port, started = free_port(), []
        for number, machine in enumerate(self.machines):
            command = [sys.executable, "-m", *torchrun(number, NETWORK, port, "-m", "--", "shoal", *words)]
            started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", machine, *command],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=self.environment,
                )
            )
        try:
            told = [process.communicate(timeout=SECONDS) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(process.returncode for process in started):
            raise RuntimeError(f"{' '.join(words)}: {told[0][1][-3000:]}")
        return told[0][0]


if __name__ == "__main__":
    main()
