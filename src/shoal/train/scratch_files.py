"""A rank's files for what its layout offloads ``@nvme``: inside the run directory, or where the config says."""

from __future__ import annotations

from pathlib import Path

from shoal.parallel.offload.direct_files import DirectFiles
from shoal.parallel.offload.scratch import Scratch
from shoal.plan.resolve import Job


def scratch_root(job: Job, run: Path) -> Path | None:
    """The directory for this run's ranks; None if the layout keeps nothing on disks."""
    if not any(part.nvme for part in job.layout.offload):
        return None
    given = job.config.offload.scratch
    return run / "scratch" if given is None else Path(given).expanduser()


def run_name(run: Path) -> str:
    """The name by which other processes recognise the owner of a directory."""
    return run.absolute().name


def open_files(job: Job, run: Path, rank: int) -> DirectFiles | None:
    """This rank's files, in a directory that is removed when they are closed."""
    root = scratch_root(job, run)
    if root is None:
        return None
    scratch = Scratch(root, run_name(run), rank)
    return DirectFiles(scratch.path, scratch=scratch)
