"""What needs root: a disk that is really full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import Train

from shoal.launch.report import FAILED, FINISHED
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.run_directory import RunDirectory

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root"),
]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"this root may not mount: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_keeps_the_last_commit(train: Train, small_disk: Path, tmp_path: Path) -> None:
    options = {"recipe__steps": 40, "checkpoint__every": 2, "checkpoint__keep": 100}
    full = train("disk/run", "dp=2", **options)
    assert full.report.code == FAILED
    assert full.report.message.startswith("rank 0 failed: the disk is full"), full.report.message
    run = RunDirectory(small_disk / "run")
    assert 0 < run.step() < 40
    Checkpoint(run.disk, run.step()).verify()
    # With room again, the same command goes on to the same end.
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    continued = train("disk/run", "dp=2", **options)
    assert continued.report.code == FINISHED, continued.report.message
    assert continued.hexes == train("whole", "dp=2", **options).hexes
