"""A submitted job's record, ``job.json`` in its run directory: how status, logs, cancel and ls find the job again."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.facts.input.untrusted_files import read_settings
from shoal.facts.problem import BadInput
from shoal.launch.jobs.job import CANCELLED, CONFIG, EXIT, LaunchJob
from shoal.train.files import private_files, replace_text
from shoal.train.run_directory import RunDirectory

FILE = "job.json"


class JobRecord(BaseModel):
    """What was submitted, and the engine's name for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    job: LaunchJob
    submitted: float = Field(default_factory=time.time)
    host: str = Field(default_factory=socket.gethostname)

    @property
    def run(self) -> Path:
        return self.job.run

    @property
    def exit_code(self) -> int | None:
        """The exit code that the job itself recorded: engines forget, and rename exits."""
        return self._noted(EXIT)

    @property
    def asked_to_end(self) -> bool:
        return self._noted(CANCELLED) is not None

    def _noted(self, file: str) -> int | None:
        try:
            name, _, code = (self.job.folder / file).read_text().strip().partition(" ")
            return int(code or 0) if name == self.id else None
        except (OSError, ValueError):
            return None

    def note_cancelled(self) -> None:
        """Record the cancellation. The job reads it as it ends, and does not restart."""
        with private_files():
            replace_text(self.job.folder / CANCELLED, f"{self.id}\n")


def write_files(job: LaunchJob, files: dict[str, str]) -> None:
    """Write the job's files into its run directory, readable by the owner only."""
    RunDirectory(job.run).check_place()
    with private_files():
        job.folder.mkdir(parents=True, exist_ok=True)
        for name, text in {CONFIG: job.config, **files}.items():
            replace_text(job.folder / name, text)


def write_record(record: JobRecord) -> None:
    with private_files():
        replace_text(record.run / FILE, record.model_dump_json(indent=2) + "\n")


def read_record(run: Path) -> JobRecord:
    """The record of a run directory."""
    try:
        found = JobRecord.model_validate_json(read_settings(run / FILE))
    except FileNotFoundError:
        raise BadInput(
            f"{run} has no job: no {FILE} there",
            "the run directory of shoal launch --submit; shoal ls lists those in runs",
        ) from None
    except (OSError, ValidationError, ValueError) as error:
        raise BadInput(
            f"{run / FILE} cannot be read: {str(error).splitlines()[0]}", "submit it again"
        ) from None
    # The directory may have moved, or be mounted elsewhere here.
    return found.model_copy(update={"job": found.job.model_copy(update={"run": run.absolute()})})


def records(place: Path) -> list[JobRecord]:
    """Records of all runs in a directory, newest first."""
    found = []
    for path in place.glob(f"*/{FILE}"):
        try:
            found.append(read_record(path.parent))
        except BadInput:
            continue  # not one of our files
    return sorted(found, key=lambda record: -record.submitted)
