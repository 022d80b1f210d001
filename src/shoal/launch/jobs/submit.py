"""Submit a job: ask the engine first, then write its files, send it, and record its name."""

from __future__ import annotations

from shoal.facts.problem import BadInput
from shoal.launch.jobs.job import LaunchJob
from shoal.launch.jobs.record import FILE, JobRecord, read_record, write_files, write_record
from shoal.launch.jobs.targets import find_target
from shoal.train.run_directory import RunDirectory


def write_job(job: LaunchJob) -> dict[str, str]:
    """The job's files, in the run directory."""
    _check_free(job)
    files = find_target(job.target).write(job)
    write_files(job, files)
    return files


def submit_job(job: LaunchJob) -> tuple[JobRecord, str]:
    """The record of the submitted job, and the engine's reply to the check. Nothing is written until the engine
    agrees.
    """
    target = find_target(job.target)
    RunDirectory(job.run).check_place()
    said = target.check(job)
    write_job(job)
    record = JobRecord(id=target.submit(job), job=job)
    write_record(record)
    return record, said


def _check_free(job: LaunchJob) -> None:
    """Refuse a second job for the same run: they would compete for it."""
    if not (job.run / FILE).exists():
        return
    before = read_record(job.run)
    found = find_target(before.job.target).status(before)
    if not found.over:
        raise BadInput(
            f"{job.run} has a job already: {before.job.target} {before.id} is {found.state}",
            f"shoal cancel {job.run}, or another directory: --run DIR",
        )
