"""Ranks for tests, started one by one as srun would, or by torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.train.files import read_rows
from shoal.train.guard.processes import descendants, send

SECONDS = 300.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def words(settings: list[str]) -> list[str]:
    return [word for value in settings for word in ("--set", value)]


def slurm_task(rank: int, world: int, port: int) -> dict[str, str]:
    """What srun tells a task, all of them on one node."""
    return {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_TASKS_PER_NODE": str(world),
        "SLURM_STEP_NODELIST": "localhost",
    }


class Started:
    """A process with a log."""

    def __init__(
        self, command: list[str], log: Path, environment: dict[str, str], prefix: list[str] | None = None
    ) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*(prefix or []), sys.executable, "-m", *command],
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                start_new_session=True,
            )

    def code(self) -> int:
        return self.process.wait(timeout=SECONDS)

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        send([self.process.pid, *descendants(self.process.pid)], signal.SIGKILL)
        self.process.wait()


def wait_for(condition: Callable[[], Any], started: list[Started]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        told = "\n".join(f"{one.log.name}: {one.words()[-3000:]}" for one in started)
        assert time.monotonic() < deadline and any(one.process.poll() is None for one in started), told
        time.sleep(0.05)
    return found


def steps(run: Path) -> int:
    rows = read_rows(run / "metrics.jsonl")
    return int(rows[-1]["step"]) if rows else 0
