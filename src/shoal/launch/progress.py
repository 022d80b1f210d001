"""Progress on the terminal: one live line, and notable events above it."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.facts.losses import mean_over
from shoal.facts.redact import redact
from shoal.observe.flight_recorder import (
    COMMIT,
    EVALUATE,
    EXPLAIN,
    FIRST_STEP,
    INPUT,
    REFERENCE,
    RESTORE,
    START,
    STEP,
    FlightReader,
)
from shoal.train.guard.nonfinite import SKIPPED
from shoal.train.metrics.compare import ON_CPU
from shoal.train.run_directory import EARLY, RunDirectory

# Without a terminal there is no live line; an occasional line shows that things move.
PLAIN_SECONDS = 10.0
# While nothing new is recorded, the interval between such lines doubles, up to this.
MOST_PLAIN_SECONDS = 600.0
# How often a terminal updates how long something has been going on.
TICK_SECONDS = 1.0

# What the first rank is doing, in words, if it says so.
DOING = {
    RESTORE: "reading weights",
    REFERENCE: "computing the reference",
    EVALUATE: "evaluating",
    COMMIT: "committing",
    INPUT: "waiting for input",
    EXPLAIN: "explaining an error",
}

GIVING_UP = "giving up"


class Progress:
    """Follows a run's own files, so it shows only what is recorded."""

    def __init__(
        self, console: Console, run: RunDirectory, steps: int, quiet: bool = False, compiles: bool = False
    ) -> None:
        """``quiet``: another launcher of the same run shows progress. ``compiles``: the first step of a process
        compiles.
        """
        self.console, self.run, self.steps, self.quiet = console, run, steps, quiet
        self.compiles = compiles
        self.last: dict[str, Any] | None = None
        self.heldout: dict[str, Any] | None = None
        self.skipped = 0
        # A resumed run's earlier rows were shown by its earlier command.
        self._metrics = Tail(run.metrics, run.step())
        self._samples = Tail(run.samples, run.step())
        self._faults = Tail(run.faults, run.step(), since=time.time())
        self._recent: deque[float] = deque(maxlen=20)
        self._printed = self._ticked = time.monotonic()
        self._patience = PLAIN_SECONDS
        self._new = False  # a row that was not shown yet
        self._said: int | None = None  # the step of the last line shown
        self._activity = Activity(run.flight(0))
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal and not quiet
            else None
        )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
            self._live.update(Text("starting"), refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.poll()
        self._activity.close()
        if self._live:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """``style``: used if the terminal has colours."""
        # A style given to ``print`` itself would colour the live line too.
        self.console.print(Text(redact(text), style=style), highlight=False, soft_wrap=True)

    def poll(self) -> None:
        if self.quiet:
            return
        for row in self._faults.read():
            self.skipped += row["kind"] == "nonfinite" and row["action"] == SKIPPED
            # The fault that ends the run is reported at the end.
            if row.get("action") != GIVING_UP:
                self.say(_fault(row), "yellow")
        for row in self._metrics.read():
            self._read(row)
        for row in self._samples.read():
            # Directly below the line of its step, it need not name the step again.
            of = "" if row["step"] == self._said else f" of step {row['step']}"
            self.say(f"  sample{of}: {row['prompt'][-24:]!r} → {row['text'][:72]!r}", "dim")
        now = time.monotonic()
        self._activity.look(now)
        if self._live:
            self._show(self._live, now)
        elif now - self._printed > (PLAIN_SECONDS if self._new else self._patience):
            self._patience = PLAIN_SECONDS if self._new else min(2 * self._patience, MOST_PLAIN_SECONDS)
            if self._new:
                self._say_row([])
            else:
                self.say(self.waiting(now))
                self._printed = now

    def _read(self, row: dict[str, Any]) -> None:
        """Take in a new row; notable things in it are shown at once."""
        self.last, self._new = row, True
        self._recent.append(row["step_s"])
        notable = []
        if row.get("heldout_loss") is not None:
            self.heldout = row
            notable.append(f"validation loss {validated(row)} nats/{mean_over(row)}")
        if row.get(EARLY):
            notable.append("the validation loss has stopped falling: the run ends here")
        if "compared" in row and row["compared"].get("told", True):
            notable.append(_compared(row["compared"]))
            if drift := row["compared"].get("drift"):
                notable.append(drift)
        if notable:
            self._say_row(notable, "green" if self.heldout is row else "")

    def _say_row(self, notable: list[str], style: str = "") -> None:
        """One line per step: what is notable, plus the step's numbers if there is no live line."""
        assert self.last is not None
        self._said = self.last["step"]
        numbers = [f"step {self._said:>6}"] if self._live else self.line()
        self.say("  ".join([*numbers, "; ".join(notable)] if notable else numbers), style)
        if not self._live:
            self._printed, self._new = time.monotonic(), False

    def _show(self, live: Live, now: float) -> None:
        """Show the last row; if no new row comes for long, also what is going on."""
        if not self._new and now - self._ticked < TICK_SECONDS:
            return
        quiet = self.last is None or self._activity.seconds(now) > PLAIN_SECONDS
        waiting = self.waiting(now) if quiet else ""
        room = self.console.width - len(waiting)
        live.update(
            Text("  ".join([*fitted(self.line(), room), *([waiting] if waiting else [])])), refresh=True
        )
        self._ticked, self._new = now, False

    def waiting(self, now: float) -> str:
        """What is going on that has not been recorded yet, for how long, and the predicted step time."""
        phase, step, (part, parts) = self._activity.phase, self._activity.step, self._activity.part
        elapsed = _duration(self._activity.seconds(now))
        if phase not in (STEP, FIRST_STEP):
            which = f" {part}/{parts}" if parts else ""
            return f"{DOING.get(phase, 'starting')}{which}, {elapsed}"
        predicted = self.run.read_plan().get("step", {}).get("seconds")
        expected = f" (predicted: {_duration(predicted)})" if predicted and predicted >= 1 else ""
        doing = "compiling and running" if phase == FIRST_STEP and self.compiles else "running"
        return f"step {step:>6}/{self.steps}  {doing}, {elapsed}{expected}"

    def line(self) -> list[str]:
        """The last row, number by number; empty before the first one."""
        row = self.last
        if row is None:
            return []
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
        rate, norm = row.get("lr"), row.get("grad_norm")
        pace = sum(self._recent) / len(self._recent)
        return [
            f"step {row['step']:>6}/{self.steps}",
            f"loss {loss}",
            *([f"lr {rate:.3g}"] if rate is not None else []),
            *([f"gradient {norm:.3g}"] if norm is not None else []),
            f"{_rate(row['tokens_per_s'])} tokens/s",
            *([f"MFU {100 * row['mfu']:.0f} %"] if row["mfu"] else []),
            f"memory {row['memory_peak'] / 2**20:,.0f} MiB",
            f"ETA {_duration((self.steps - row['step']) * pace)}",
        ]


# What a line drops first on a narrow terminal.
LEAST = ("memory", "MFU", "gradient", "lr", "ETA")


def fitted(parts: list[str], room: int) -> list[str]:
    """As many of the numbers as fit on one line."""
    for name in LEAST:
        if len("  ".join(parts)) <= room:
            break
        parts = [part for part in parts if not part.startswith(name)]
    return parts


class Activity:
    """What the first rank is doing, and since when, from its flight recorder."""

    def __init__(self, path: Path) -> None:
        self.phase, self.step, self.part = START, 0, (0, 0)
        self._reader = FlightReader(path)
        self._since = time.monotonic()
        self._before = _inode(path)  # of an earlier launcher's rank

    def look(self, now: float) -> None:
        if self._before is not None:
            if _inode(self._reader.path) == self._before:
                return
            self._before = None
        seen = self._reader.look()
        if seen is None:
            return
        if (seen.phase, seen.step) != (self.phase, self.step):
            self.phase, self.step, self._since = seen.phase, seen.step, now
        self.part = seen.part

    def seconds(self, now: float) -> float:
        return now - self._since

    def close(self) -> None:
        self._reader.close()


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


class Tail:
    """Rows that a file has gained since the last look, later than a given step and time.

    A resume replaces the file; the new one is read from its start, and rows already shown are skipped.
    """

    def __init__(self, path: Path, step: int, since: float = 0.0, launch: str = "") -> None:
        """``launch``: only rows of attempts of this launch; a resume may still roll back those of an earlier one."""
        self.path = path
        self.since, self.launch = since, launch
        self._inode = 0
        self._offset = 0
        self._step = step
        self._shown = step  # in the file before this one

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset, self._shown = inode, 0, self._step
                file.seek(self._offset)
                content = file.read()
        except OSError:  # not there yet; display problems must not end the run
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        parsed = [row for line in whole.splitlines() if (row := _parse(line)) is not None]
        rows = [row for row in parsed if str(row.get("attempt", "")).startswith(self.launch)]
        fresh = [row for row in rows if self._is_fresh(row)]
        self._step = max([self._step, *(row.get("step", 0) for row in rows)])
        return fresh

    def _is_fresh(self, row: dict[str, Any]) -> bool:
        return row["time"] >= self.since if "time" in row else row["step"] > self._shown


def _parse(line: bytes) -> dict[str, Any] | None:
    """A row; None for a line torn by a full disk or a crash."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and ("time" in row or "step" in row) else None


def _fault(row: dict[str, Any]) -> str:
    if row["kind"] == "restart":
        return f"workers restarted (attempt {row['attempt'] + 1}) from step {row['resumed_step']}"
    if "message" in row and "rank" in row:
        return f"step {row['step']:>6}  {row['message']}; {row['action']}"
    return f"step {row['step']:>6}  {row['kind']}: {row['action']}"


def validated(row: dict[str, Any]) -> str:
    """The validation loss; with several sets, each by name."""
    others = row.get("validation", {})
    named = ", ".join(f"{name} {loss:.4f}" for name, loss in others.items() if loss is not None)
    return named if len(others) > 1 else f"{row['heldout_loss']:.4f}"


def _compared(found: dict[str, Any]) -> str:
    """Predictions beside measurements; for what was not compared, why not."""
    parts = []
    if "step_s" in found:
        times = f"{found['predicted_step_s']:.3g} s/step, measured {found['step_s']:.3g}"
        parts.append(f"predicted {times} ({found['step_s_error']:+.1%}; rates: {found['rates']})")
    if "memory_peak" in found:
        predicted, measured = found["predicted_memory_peak"] / 2**30, found["memory_peak"] / 2**30
        parts.append(
            f"predicted {predicted:.2f} GiB, measured {measured:.2f} ({found['memory_peak_error']:+.1%})"
        )
    names = {"step_s": "time", "memory_peak": "memory"}
    parts += [
        f"{names[name]} not compared: {reason}"
        for name, reason in found.get("missing", {}).items()
        if reason != ON_CPU
    ]
    return "; ".join(parts)


def _rate(value: float) -> str:
    return (
        f"{value / 1e6:.1f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
