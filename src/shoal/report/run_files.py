"""Read what a run directory contains, as it is: half written, torn, from another version, or by a stranger. Needs no
torch.

Missing content is never refused; what cannot be read is named in ``notes``.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.facts.input.untrusted_files import parse_toml, read_json, read_settings
from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput
from shoal.report.columns import Columns, is_number

# The most rows to keep of a file of events or samples; and characters of a text.
MOST_ROWS = 20_000
LONGEST_LINE = 1 << 20
# For a launcher on another machine, whose process cannot be checked: a run without new rows for this long counts as
# over.
QUIET_SECONDS = 900.0
SIGNS = ("config.toml", "metrics.jsonl", "manifest.json", "plan.json", ".lock")

RUNNING, FINISHED, EARLY, FAILED, LOST, STOPPED, STARTING = (
    "running", "finished", "ended early", "failed", "launcher lost", "stopped", "no step yet",
)  # fmt: skip


@dataclass
class RunFiles:
    """One run. A missing or broken file is empty here."""

    path: Path
    metrics: Columns
    faults: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    plan: dict[str, Any]
    manifest: dict[str, Any]
    profile: dict[str, Any]
    config: dict[str, Any]
    config_text: str
    observed: list[dict[str, Any]]  # by rank
    alive: dict[str, Any]  # left by a launcher that has not ended
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def steps(self) -> int | None:
        """The number of steps it should have."""
        found = lookup(self.config, "recipe", "steps")
        return int(found) if is_number(found) else None

    @property
    def last_step(self) -> int:
        return self.metrics.steps[-1] if self.metrics.steps else 0

    @cached_property
    def layout(self) -> Layout | None:
        """The last layout; None if it is unknown, or not valid in this version."""
        for text in (
            *reversed(self.metrics.layouts[-1:]),
            self.plan.get("layout"),
            self.config.get("layout"),
        ):
            try:
                if isinstance(text, str) and text != "auto":
                    return Layout.parse(text)
            except BadInput:
                continue
        return None

    @cached_property
    def world(self) -> int | None:
        found = self.metrics.last("world") or self.plan.get("world")
        return int(found) if is_number(found) else None

    @cached_property
    def state(self) -> str:
        """The run's state, according to its directory."""
        if self.alive:
            return RUNNING if self._lives() else LOST
        if not self.metrics.steps:
            return FAILED if self.faults else STARTING
        if self.steps is not None and self.last_step >= self.steps:
            return FINISHED
        if self.metrics.ended_early:
            return EARLY
        return FAILED if self.faults and self.faults[-1].get("action") == "giving up" else STOPPED

    def _lives(self) -> bool:
        """Whether the launcher in ``.alive`` still runs: judged by its process on this machine, by new rows
        elsewhere.
        """
        process, host = self.alive.get("process"), lookup(self.manifest, "host", "name")
        if isinstance(process, int) and host == socket.gethostname():
            return process > 0 and Path(f"/proc/{process}").exists()
        try:
            newest = max((self.path / name).stat().st_mtime for name in ("metrics.jsonl", ".alive"))
        except OSError:
            return False
        return time.time() - newest < QUIET_SECONDS


def lookup(tree: Any, *keys: str) -> Any:
    """A value of nested tables; None if any level is missing or not a table."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def read_run(path: Path, metrics: Columns | None = None) -> RunFiles:
    """Raises BadInput if there is no run; otherwise reads whatever exists. ``metrics``: rows that were read already."""
    if not path.exists():
        raise BadInput(f"there is no run at {path}", "the directory of a run, such as runs/tiny")
    if not path.is_dir():
        raise BadInput(f"{path} is a file, not a run directory", f"shoal report {path.parent}")
    if not any((path / sign).exists() for sign in SIGNS):
        inside = sorted(one.name for one in path.iterdir() if (one / "metrics.jsonl").exists())[:3]
        fix = f"{path / inside[0]}" if inside else "the directory that shoal train names in its first line"
        what = (
            "is empty"
            if not any(path.iterdir())
            else "holds no run: neither config.toml nor metrics.jsonl is in it"
        )
        raise BadInput(f"{path} {what}", fix)
    notes: list[str] = []
    text, config = _config(path / "config.toml", notes)
    if metrics is None:
        metrics = _metrics(path / "metrics.jsonl", notes)
    return RunFiles(
        path=path,
        metrics=metrics,
        faults=_few(path / "faults.jsonl", notes),
        samples=_few(path / "samples.jsonl", notes),
        plan=_table(path / "plan.json", notes),
        manifest=_table(path / "manifest.json", notes),
        profile=_table(path / "profile.json", notes),
        config=config,
        config_text=text,
        observed=_observed(path / "observed", notes),
        alive=_table(path / ".alive", []),
        notes=notes,
    )


def _metrics(path: Path, notes: list[str]) -> Columns:
    metrics = Columns()
    torn = sum(not metrics.add(row) for row in _rows(path, notes))
    if torn:
        notes.append(f"{path.name}: {torn} lines are no rows of steps, and are left out")
    if not metrics.in_order:
        notes.append(f"{path.name}: steps are not in order; of each the last row counts")
        metrics.sort()
    return metrics


def _config(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    try:
        text = read_settings(path) if path.is_file() else ""
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return "", {}
    try:
        return text, parse_toml(text)
    except (ValueError, BadInput) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return text, {}


def _table(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = read_json(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    return content if isinstance(content, dict) else {}


def _few(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    rows = []
    for row in _rows(path, notes):
        if isinstance(row, dict):
            rows.append(row)
        if len(rows) == MOST_ROWS:
            notes.append(f"{path.name}: the first {MOST_ROWS:,} rows are shown")
            break
    return rows


def _rows(path: Path, notes: list[str]) -> Iterator[Any]:
    """Every line's value; None for a line torn by a crash, a full disk or a write in progress."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                if not line.endswith(b"\n") and file.tell() == os.fstat(file.fileno()).st_size:
                    return  # the last one is still being written
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    yield None
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")


def _observed(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not folder.is_dir():
        return []
    found = [_table(path, notes) for path in sorted(folder.glob("rank-*.json"))[:MOST_ROWS]]
    return [one for one in found if is_number(one.get("rank"))]
