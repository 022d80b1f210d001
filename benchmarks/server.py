"""A parameter server with one worker slowed to a third: asynchronous against synchronous, in loss and in throughput.

The embedded default. One more asynchronous run loses a worker to SIGKILL on its way.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from record import record
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

from shoal.facts.config.file import load  # noqa: E402
from shoal.launch import local  # noqa: E402
from shoal.plan.resolve import resolve  # noqa: E402
from shoal.train.files import read_rows  # noqa: E402
from shoal.train.run_directory import RunDirectory  # noqa: E402

SLOWED = "tests.train.slowed:work"
# The first steps start processes and caches.
WARM_UP = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-server-") as folder:
        sync = measure(Path(folder), "sync", options)
        asynchronous = measure(Path(folder), "async", options)
        survived = measure(Path(folder), "async", options, kill_at=options.steps // 3)
    record(
        "server",
        layout=f"dp={options.workers}",
        servers=options.servers,
        bound=options.staleness,
        steps=options.steps,
        slowed="one worker to a third",
        sync=sync,
        asynchronous=asynchronous,
        killed_worker=survived,
        loss_apart=asynchronous["heldout_loss"] / sync["heldout_loss"] - 1,
        speedup=asynchronous["tokens_per_s"] / sync["tokens_per_s"],
    )


def measure(folder: Path, mode: str, options: argparse.Namespace, kill_at: int = 0) -> dict[str, Any]:
    values = {
        "server.servers": options.servers,
        "server.mode": mode,
        "server.staleness": options.staleness,
        "recipe.steps": options.steps,
        "cluster.on": f"{options.workers}xcpu",
        "data.cache": folder / "cache",
        "fault.timeout": 600,
    }
    given = [f"{name}={value}" for name, value in values.items()]
    job = resolve(load(None, given, f"dp={options.workers}").config)
    run = RunDirectory(folder / f"{mode}-{kill_at}")
    if kill_at:
        threading.Thread(target=kill_worker, args=(run, kill_at), daemon=True).start()
    report = local.train(job, run, False, Console(stderr=True), entrypoint=SLOWED)
    if report.code != 0:
        raise SystemExit(f"{mode}: {report.message}")
    rows = read_rows(run.metrics)
    timed = [row for row in rows[WARM_UP:] if "heldout_loss" not in row]
    staleness = [one for row in rows for one in row["staleness"]]
    faults = read_rows(run.faults) if run.faults.exists() else []
    pushes = [worker for row in rows for worker in row["workers"]]
    return {
        "heldout_loss": rows[-1]["heldout_loss"],
        "loss": statistics.fmean(row["loss"] for row in rows[-20:]),
        "tokens_per_s": sum(row["targets"] for row in timed) / sum(row["step_s"] for row in timed),
        "staleness_max": max(staleness),
        "staleness_mean": statistics.fmean(staleness),
        "pushes_by_worker": [pushes.count(worker) for worker in range(options.workers)],
        "faults": [row["kind"] for row in faults],
        "attempts": len({row["attempt"] for row in rows}),
    }


def kill_worker(run: RunDirectory, step: int) -> None:
    """The first one, which is not slowed, once so many steps are recorded."""
    while not run.metrics.exists() or run.metrics.read_bytes().count(b"\n") < step:
        time.sleep(0.01)
    for process in multiprocessing.active_children():
        if process.name == "shoal-worker-0" and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
