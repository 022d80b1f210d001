"""This machine: ``shoal train`` in the background, with output and exit code written to files."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
from pathlib import Path

from shoal.facts.problem import BadInput
from shoal.launch.jobs import state
from shoal.launch.jobs.follow import last_lines
from shoal.launch.jobs.job import CONFIG, EXIT, LaunchJob
from shoal.launch.jobs.record import JobRecord
from shoal.launch.jobs.state import JobState
from shoal.train.files import private_files

SCRIPT = "job.sh"


def write(job: LaunchJob) -> dict[str, str]:
    words = [*job.program, "train", str(job.folder / CONFIG), "--run", str(job.run)]
    return {SCRIPT: background(job, words)}


def background(job: LaunchJob, words: list[str]) -> str:
    """A shell command that runs ``words`` and records the exit code, because the process that started it may be gone
    by then.
    """
    folder = shlex.quote(str(job.folder))
    return f"""#!/bin/bash
# Written by shoal launch.
folder={folder}
rm -f "$folder/{EXIT}"
cd {shlex.quote(str(job.working_directory))} || exit 2
{shlex.join(words)} &
launcher=$!
# What is sent to this process is meant for the launcher: it finishes the step, commits and exits with 75.
trap 'kill -TERM "$launcher" 2> /dev/null' TERM INT USR1
while true; do
    wait "$launcher"
    code=$?
    kill -0 "$launcher" 2> /dev/null || break
done
echo "{job.target}-$$ $code" > "$folder/{EXIT}"
exit "$code"
"""


def check(job: LaunchJob) -> str:
    return "starts at once on this machine"


def submit(job: LaunchJob) -> str:
    """Start it in its own session: closing the terminal does not end it."""
    with private_files():
        handle = os.open(job.folder / f"{job.target}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            ["bash", str(job.folder / SCRIPT)],  # noqa: S607
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=handle,
            start_new_session=True,
        )
    finally:
        os.close(handle)
    return f"{job.target}-{process.pid}"


def by_hand(job: LaunchJob) -> str:
    return shlex.join(["bash", str(job.folder / SCRIPT)])


def status(record: JobRecord) -> JobState:
    code = record.exit_code
    if code is not None:
        return JobState(state.ended(code, record.asked_to_end), f"exit {code}", record.host, 0, code)
    if record.host != socket.gethostname():
        return JobState(
            state.RUNNING, f"a process of {record.host}, where shoal status knows more", record.host
        )
    if _lives(record):
        return JobState(state.RUNNING, f"process {_process(record)}", record.host)
    return JobState(state.FAILED, "its process is gone without a word", record.host)


def logs(record: JobRecord, lines: int) -> str:
    return last_lines(log_file(record), lines)


def log_file(record: JobRecord) -> Path:
    return record.job.folder / f"{record.job.target}.log"


def cancel(record: JobRecord, now: bool) -> str:
    if record.host != socket.gethostname():
        raise BadInput(f"{record.id} is a process of {record.host}", "the same command there")
    if not _lives(record):
        raise BadInput(f"{record.id} is over: {status(record).state}", "nothing to cancel")
    record.note_cancelled()
    process = _process(record)
    if now:
        os.killpg(process, signal.SIGKILL)
        return f"killed {record.id}"
    os.kill(process, signal.SIGTERM)
    return f"{record.id} finishes its step, commits and ends"


def _process(record: JobRecord) -> int:
    return int(record.id.rpartition("-")[2])


def _lives(record: JobRecord) -> bool:
    """Whether that process is still ours: process ids are reused."""
    try:
        words = Path(f"/proc/{_process(record)}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.fsencode(record.job.folder / SCRIPT) in words
