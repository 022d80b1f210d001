"""What a person sees while a run goes on: one live line, and what is worth keeping above it."""

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

from shoal.train.rundir import RunDirectory

# Without a terminal there is no live line; a line now and then shows that things move.
PLAIN_SECONDS = 10.0


class Progress:
    """Follows a run's own files, so it shows what is recorded and nothing else."""

    def __init__(self, console: Console, run: RunDirectory, steps: int) -> None:
        self.console, self.run, self.steps = console, run, steps
        self.last: dict[str, Any] | None = None
        self.heldout: dict[str, Any] | None = None
        self._metrics = Tail(run.metrics)
        self._samples = Tail(run.samples)
        self._faults = Tail(run.faults)
        self._recent: deque[float] = deque(maxlen=20)
        self._printed = time.monotonic()
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
            self._live.update(Text("starting"), refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.poll()
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def skip_existing(self) -> None:
        """A resumed run's earlier rows were shown by its earlier command."""
        for tail in (self._metrics, self._samples, self._faults):
            tail.read()

    def poll(self) -> None:
        for row in self._faults.read():
            self.say(_fault(row))
        for row in self._metrics.read():
            self.last = row
            self._recent.append(row["step_s"])
            if row.get("heldout_loss") is not None:
                self.heldout = row
                self.say(f"step {row['step']:>6}  held-out loss {row['heldout_loss']:.4f} nats a token")
        for row in self._samples.read():
            self.say(f"step {row['step']:>6}  sample: {row['prompt'][-24:]!r} → {row['text'][:72]!r}")
        if self.last is None:
            return
        if self._live:
            self._live.update(Text(self.line()), refresh=True)
        elif time.monotonic() - self._printed > PLAIN_SECONDS:
            self._printed = time.monotonic()
            self.say(self.line())

    def line(self) -> str:
        row = self.last
        assert row is not None
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
        mfu = f"  MFU {100 * row['mfu']:.0f} %" if row["mfu"] else ""
        pace = sum(self._recent) / len(self._recent)
        return (
            f"step {row['step']:>6}/{self.steps}  loss {loss}  {_rate(row['tokens_per_s'])} tokens/s{mfu}"
            f"  memory {row['memory_peak'] / 2**20:,.0f} MiB  ETA {_duration((self.steps - row['step']) * pace)}"
        )


class Tail:
    """The rows that a file has gained since the last look; a file that was replaced is read anew, past known steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0
        self._offset = 0
        self._step = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = [json.loads(line) for line in whole.splitlines()]
        fresh = [row for row in rows if row.get("step", self._step + 1) > self._step]
        self._step = max([self._step, *(row.get("step", 0) for row in rows)])
        return fresh


def _fault(row: dict[str, Any]) -> str:
    if row["kind"] == "restart":
        return f"workers restarted (attempt {row['attempt'] + 1}) from step {row['resumed_step']}"
    return f"step {row['step']:>6}  {row['kind']}: {row['action']}"


def _rate(value: float) -> str:
    return (
        f"{value / 1e6:.1f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
