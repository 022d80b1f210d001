"""A rank's files for what its layout offloads ``@nvme``: below the run, or where the config says."""

from __future__ import annotations

from pathlib import Path

from shoal.parallel.offload.direct_files import DirectFiles
from shoal.parallel.offload.scratch import Scratch
from shoal.plan.resolve import Job


def scratch_root(job: Job, run: Path) -> Path | None:
    """The directory that holds those of this run's ranks; None: the layout keeps nothing on disks."""
    if not any(part.nvme for part in job.layout.offload):
        return None
    given = job.config.offload.scratch
    return run / "scratch" if given is None else Path(given).expanduser()


def run_name(run: Path) -> str:
    """By which others know whose a directory is."""
    return run.absolute().name


def open_files(job: Job, run: Path, rank: int) -> DirectFiles | None:
    """This rank's, in a directory that goes when they are closed."""
    root = scratch_root(job, run)
    if root is None:
        return None
    scratch = Scratch(root, run_name(run), rank)
    return DirectFiles(scratch.path, scratch=scratch)
