"""States of four times a memory cgroup: in files, with losses and weights of steps without a limit, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup")
COMMAND = Path(__file__).parents[3] / "benchmarks" / "bounded_memory.py"


def problem() -> str | None:
    """Why no memory cgroup can be made here."""
    place = GROUPS / "memory" if (GROUPS / "memory").is_dir() else GROUPS
    if os.geteuid() != 0 or not os.access(place, os.W_OK):
        return "a memory cgroup needs root, and control groups that can be written to"
    if place == GROUPS and "memory" not in _words(GROUPS / "cgroup.subtree_control"):
        return "the memory controller is not handed on by the first cgroup"
    return None


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(problem() is not None, reason=str(problem())),
]


def test_states_of_four_times_a_memory_cgroup_change_no_bit(tmp_path: Path) -> None:
    command = [sys.executable, str(COMMAND), "--steps", "2", "--check", "--scratch", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, f"{said.stdout}\n{said.stderr}"
    found = json.loads(said.stdout)
    assert found["limited"]["most_bytes"] <= found["limit_bytes"]
    assert found["unlimited"]["most_bytes"] > 4 * found["limit_bytes"], "it had all states in memory"
