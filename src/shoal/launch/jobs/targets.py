"""The interface of all targets, and their list. Each target is a module, imported on first use."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from shoal.facts.problem import BadInput, did_you_mean
from shoal.launch.jobs.job import LaunchJob
from shoal.launch.jobs.record import JobRecord
from shoal.launch.jobs.state import JobState

TARGETS = ("local", "slurm", "ray", "kubernetes", "sagemaker")


class JobTarget(Protocol):
    """An engine that runs jobs."""

    def write(self, job: LaunchJob) -> dict[str, str]:
        """The files of a job: names in the run's ``job`` directory, and contents."""

    def check(self, job: LaunchJob) -> str:
        """Ask the engine whether it would accept the job, before anything is written; returns its reply."""

    def submit(self, job: LaunchJob) -> str:
        """Submit what was written; returns the engine's name of the job."""

    def status(self, record: JobRecord) -> JobState:
        """The job's state."""

    def logs(self, record: JobRecord, lines: int) -> str:
        """The last lines of what the job printed."""

    def log_file(self, record: JobRecord) -> Path | None:
        """Where it prints to, if this machine can read that."""

    def cancel(self, record: JobRecord, now: bool) -> str:
        """Make it finish its step, commit and end; or end at once. Returns what was done, in words."""

    def by_hand(self, job: LaunchJob) -> str:
        """The command that submits what was written."""


def find_target(name: str) -> JobTarget:
    if name not in TARGETS:
        raise BadInput(f"--to {name}: there is no such target", did_you_mean(name, TARGETS))
    return cast(JobTarget, importlib.import_module(f"shoal.launch.jobs.{name}"))


def ask(
    words: Sequence[str],
    missing: str,
    given: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's command; ``missing``: what to do if it is not installed."""
    if shutil.which(words[0]) is None:
        raise BadInput(f"{words[0]} is not on this machine", missing)
    try:
        return subprocess.run(
            list(words),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            input=given,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"{words[0]} did not answer within 120 s", "ask again; is the scheduler well?"
        ) from None


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """A command's error in one line, without its own name and pointers to its manual."""
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines()]
    lines = [line for line in lines if line and not line.startswith("Try ")]
    return re.sub(r"^(\w+: )?(error: )?", "", lines[-1]) if lines else f"exit {done.returncode}"
