"""Scratch directories of a run, before its ranks start: checked, and cleared of what earlier runs left."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shoal.facts.layout.offload import waiting
from shoal.facts.problem import BadInput
from shoal.parallel.offload.scratch import remove_leftovers, scratch_problems
from shoal.plan.resolve import Job
from shoal.predict.memory import ledgers
from shoal.train.scratch_files import run_name, scratch_root


def check_scratch(job: Job, run: Path, nodes: int = 1) -> None:
    """Refuse a directory that cannot hold what the ranks of a node store there. Creates nothing."""
    root = scratch_root(job, run)
    if root is None:
        return
    # The maximum over all stages: ranks fill nodes stage by stage, so no node holds more.
    each = max(one.nvme for one in ledgers(job.workload()))
    updated = waiting(job.layout.offload, "optimizer")
    if updated is not None and updated.nvme:
        # A commit's copy is there too until it is written: one for each place that commits go to.
        each *= 2 if job.config.checkpoint.memory == 0 else 3
    needed = each * -(-job.layout.world // nodes)
    made_by_us = job.config.offload.scratch is None
    problems = scratch_problems(root, needed, made_by_us, run_name(run))
    if problems:
        raise BadInput(problems)


def clear_scratch(job: Job, run: Path) -> None:
    """Remove what killed runs have left there, including this run's earlier attempts."""
    if (root := scratch_root(job, run)) is not None:
        remove_leftovers(root)
        if job.config.offload.scratch is None:
            with suppress(OSError):
                root.rmdir()  # it was created for the run
