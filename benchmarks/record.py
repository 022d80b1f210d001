"""A result is data: what was measured, on what machine, with which versions, at which commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shoal.facts.cluster.this_machine import look

RESULTS = Path(__file__).parent / "results"


def record(name: str, **measured: Any) -> None:
    """Append a row to ``results/NAME.jsonl`` and print it."""
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "device": look().device.name,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        **measured,
    }
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=2))


def commit() -> str | None:
    """The commit, marked where the tree differs from it; None outside a repository."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
