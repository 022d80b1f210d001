"""The launcher's part of tracking: checks before a run starts, and following the run while it lasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.facts.config import Config, TrackSection
from shoal.facts.problem import BadInput, Problem
from shoal.facts.redact import redact, redact_values
from shoal.launch.interfaces import address_of
from shoal.launch.track.logins import refused_login
from shoal.launch.track.prometheus import Endpoint
from shoal.launch.track.tracker import TRACKERS
from shoal.plan.resolve import Job
from shoal.train.files import last_row
from shoal.train.run_directory import RunDirectory

# Seconds between two looks at the run's metrics.
LOOK_SECONDS = 0.5
# How long a finished run waits for its trackers.
END_SECONDS = 60.0
FEEDER = "shoal.launch.track.feeder"


def trackers_of(track: TrackSection) -> list[str]:
    return [name for name in TRACKERS if getattr(track, name)]


def check_trackers(config: Config, nodes: int = 1, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a tracker that is not installed, or whose server rejects the login; and a port that is taken.

    Creates nothing.
    """
    problems: list[Problem] = []
    for name in trackers_of(config.track):
        kind = TRACKERS[name]
        if absent := [rows[0] for rows in kind.needs if not any(map(_installed, rows))]:
            problems.append(
                Problem(
                    f"track.{name}: {' and '.join(absent)} not installed",
                    f"{kind.install}, or track.{name} = false",
                )
            )
    if not problems:
        asked = [refused_login(name, environment) for name in trackers_of(config.track)]
        problems += [problem for problem in asked if problem is not None]
    port = config.track.prometheus
    # Of several launchers on one machine only the leader opens it.
    if port is not None and nodes == 1:
        try:
            Endpoint("", address_of(config.cluster.interface), port).close()
        except OSError as error:
            problems.append(
                Problem(f"track.prometheus: port {port} cannot be used: {error.strerror}", "another port")
            )
    if problems:
        raise BadInput(problems)


def _installed(distribution: str) -> bool:
    # Check metadata: a directory named wandb, as W&B itself creates, could be imported.
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


@contextmanager
def tracked(job: Job, run: RunDirectory, console: Console) -> Iterator[None]:
    """Inside the context, the run's metrics are followed. Problems here never end the run."""

    def say(text: str) -> None:
        console.print(redact(text), markup=False, highlight=False)

    with ExitStack() as open_things:
        endpoint = _endpoint(job.config, run, say)
        if endpoint is not None:
            open_things.callback(endpoint.close)
        if names := trackers_of(job.config.track):
            try:
                open_things.enter_context(_fed(job, run, names, say))
            except OSError as error:
                say(f"track: no tracker is fed: {error}; metrics.jsonl has every step")
        over = threading.Event()
        heart = threading.Thread(
            target=_beat, args=(run, endpoint, over), name="shoal-heartbeat", daemon=True
        )
        heart.start()
        try:
            yield
        finally:
            over.set()
            heart.join()


def _endpoint(config: Config, run: RunDirectory, say: Any) -> Endpoint | None:
    if config.track.prometheus is None:
        return None
    address = address_of(config.cluster.interface)
    try:
        found = Endpoint(run.path.resolve().name, address, config.track.prometheus)
    except OSError as error:
        say(f"track.prometheus failed: {error.strerror}; the run goes on without it")
        return None
    say(f"Prometheus: http://{address}:{found.port}/metrics")
    return found


def _beat(run: RunDirectory, endpoint: Endpoint | None, over: threading.Event) -> None:
    """Touch ``RUN/heartbeat`` at every step, repeated steps included."""
    seen = _state(run.metrics)
    ended = False
    while not ended:
        ended = over.wait(LOOK_SECONDS)
        with suppress(OSError):
            if (now := _state(run.metrics)) != seen:
                seen = now
                row = last_row(run.metrics)
                if row is None or "step" not in row:
                    continue
                (run.path / "heartbeat").write_text(f"{row['step']}\n", encoding="utf-8")
                if endpoint is not None:
                    endpoint.tell(row)


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size


@contextmanager
def _fed(job: Job, run: RunDirectory, names: list[str], say: Any) -> Iterator[None]:
    """Inside the context, a process beside this one feeds the trackers."""
    # Its own session: a Ctrl-C is for the launcher, and the last steps still have to be sent.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", FEEDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    lines = process.stdout
    ear = threading.Thread(
        target=lambda: [say(line.rstrip("\n")) for line in lines], name="shoal-track", daemon=True
    )
    ear.start()
    with suppress(OSError):
        process.stdin.write(json.dumps(_told(job, run, names)) + "\n")
        process.stdin.flush()
    try:
        yield
    finally:
        try:
            with suppress(OSError):
                process.stdin.close()
            process.wait(END_SECONDS)
            if process.returncode:
                log = run.logs / "track.log"
                say(
                    f"track: the process that feeds {', '.join(names)} ended with {process.returncode}: {log}"
                )
        except subprocess.TimeoutExpired:
            say(f"track: not done after {END_SECONDS:.0f} s; the next start of the run gives them the rest")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            ear.join(LOOK_SECONDS)


def _told(job: Job, run: RunDirectory, names: list[str]) -> dict[str, Any]:
    config = redact_values(job.config.model_dump(mode="json"))
    return {
        "trackers": names,
        "run": {
            "path": str(run.path.resolve()),
            "project": job.config.track.project,
            "id": run.id,
            "steps": job.config.recipe.steps,
            "layout": str(job.layout),
            "config": dict(_flat(config)),
        },
    }


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
