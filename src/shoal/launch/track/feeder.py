"""The process beside the launcher that feeds the trackers: ``python -m shoal.launch.track.feeder``.

It has the launcher's environment, including API keys, which ranks do not get. If a tracker's library blocks, prints or
crashes, that happens here and not in the launcher. Standard input says what to follow; its end is the end of the run,
or of the launcher. Each problem is reported once, as a line on standard output.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.facts.redact import redact
from shoal.launch.redacted import redact_output
from shoal.launch.track.cursor import Cursor, NewRows
from shoal.launch.track.machine import Machine
from shoal.launch.track.tracker import Held, TrackedRun, Tracker, new_tracker, values_of
from shoal.train.files import OWNER_ONLY

LOOK_SECONDS = 0.5
# Seconds before a failed tracker is retried; doubles each time.
FIRST_RETRY_SECONDS, MOST_RETRY_SECONDS = 30.0, 900.0
# How long an earlier launcher's process may still be at work here.
PATIENCE_SECONDS = 60.0
AT_THE_START = ("plan.json", "config.toml")
AT_THE_END = ("report.html",)
LOCK = ".track.lock"
# The part of the launcher's final wait for its trackers that the report may take.
REPORT_SECONDS = 30.0


class Feed:
    """One tracker and its position in the curve."""

    def __init__(
        self,
        name: str,
        run: TrackedRun,
        say: Callable[[str], None],
        make: Callable[[str], Tracker] = new_tracker,
        look: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """``look``: returns the machine's current load."""
        self.name, self.run, self._say, self._make, self._look = name, run, say, make, look
        self._cursor = Cursor(run.path / "track.json")
        self._tracker: Tracker | None = None
        self._rows = NewRows(run.path / "metrics.jsonl", 0)
        self._wait, self._next = FIRST_RETRY_SECONDS, 0.0
        self._failed = False

    def feed(self, now: float) -> None:
        """Send the tracker what is new. A failure is reported once, and retried later from where it stopped."""
        if self._tracker is None and now < self._next:
            return
        try:
            self._feed()
            if self._failed:
                self._say(f"track.{self.name}: works again, and has every step")
            self._failed, self._wait = False, FIRST_RETRY_SECONDS
        except Exception as error:
            self._trouble(error, "tried again in a while")
            self._tracker, self._next = None, now + self._wait
            self._wait = min(2 * self._wait, MOST_RETRY_SECONDS)

    def _feed(self) -> None:
        if self._tracker is None:
            tracker = self._make(self.name)
            held = tracker.open(self.run, self._cursor.held(self.name))
            self._id = held.id
            self._cursor.note(self.name, held)
            self._rows = NewRows(self._rows.path, held.step)
            for file in AT_THE_START:
                self._attach(tracker, file)
            self._tracker = tracker
        rows = [*self._rows.read()]
        while rows:
            following = [*self._rows.read()]
            for row in rows[:-1]:
                self._tracker.log(row["step"], values_of(row))
            # The machine's load is only known for now, the time of the newest step.
            now = {} if following else self._look()
            self._tracker.log(rows[-1]["step"], {**values_of(rows[-1]), **now})
            self._tracker.flush()
            # Only now: a kill before this line may repeat a step, but never skips one.
            self._cursor.note(self.name, Held(self._id, rows[-1]["step"]))
            rows = following

    def _attach(self, tracker: Tracker, file: str) -> None:
        if (path := self.run.path / file).is_file():
            tracker.attach(path)

    def close(self) -> None:
        """Send the last rows, and the end. A failed tracker gets one more chance."""
        self._next = 0.0
        self.feed(time.monotonic())
        if self._tracker is None:
            return
        try:
            for file in AT_THE_END:
                self._attach(self._tracker, file)
            self._tracker.close(finished=self._rows.step >= self.run.steps)
        except Exception as error:
            self._trouble(error, "the next start of the run tries again")

    def _trouble(self, error: Exception, then: str) -> None:
        if not self._failed:
            text = " ".join(str(error).split())[:200] or type(error).__name__
            self._say(
                f"track.{self.name} failed: {text}; the run goes on, metrics.jsonl has every step; {then}"
            )
        self._failed = True


def main() -> int:
    os.umask(OWNER_ONLY)
    told = json.loads(sys.stdin.readline())
    run = TrackedRun(**{**told["run"], "path": Path(told["run"]["path"])})
    # Libraries print to a separate log; the pipe to the launcher carries only our lines.
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    log = os.open(run.path / "logs" / "track.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    redact_output()

    def say(text: str) -> None:
        line = redact(text)
        print(time.strftime("%Y-%m-%dT%H:%M:%S%z"), line, flush=True)
        try:
            ours.write(line + "\n")
        except OSError:  # the launcher is gone
            return

    with (run.path / LOCK).open("w") as lock:
        if not _taken(lock.fileno()):
            say("track: the process of an earlier launcher still feeds the trackers; they are left to it")
            return 0
        machine = Machine()
        feeds = [Feed(name, run, say, look=machine.look) for name in told["trackers"]]
        while not _ended():
            for feed in feeds:
                feed.feed(time.monotonic())
        if not write_report(run.path):
            say("track: no report could be written; what was there is attached")
        for feed in feeds:
            feed.close()
    return 0


def write_report(run: Path) -> bool:
    """Write the report to attach; returns whether it worked. Its package is above this one, so a command writes it."""
    command = [sys.executable, "-P", "-m", "shoal", "report", str(run)]
    try:
        return subprocess.run(command, timeout=REPORT_SECONDS, stdin=subprocess.DEVNULL).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _taken(lock: int) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOOK_SECONDS)
    return False


def _ended() -> bool:
    """Whether the launcher has closed its end or died; also the pause between two looks."""
    readable: tuple[list[Any], list[Any], list[Any]] = select.select([0], [], [], LOOK_SECONDS)
    return bool(readable[0]) and not os.read(0, 1 << 12)


if __name__ == "__main__":
    sys.exit(main())
