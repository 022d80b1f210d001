"""Record which samples each step used, and prove that each was used once.

A step that a fault rolled back is done again, and leaves rows of two attempts. The attempt whose row is in
metrics.jsonl counts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.train.data.loader import Batch, Loader
from shoal.train.files import RowFile


class SampleLog(RowFile):
    """One rank's rows. They are flushed as they are made, so they outlive the process."""

    def __init__(self, directory: Path, rank: int, attempt: str) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self.attempt = attempt
        super().__init__(directory / f"rank-{rank:05d}.jsonl")

    def add(self, step: int, batches: Sequence[Batch]) -> None:
        rows = [int(row) for batch in batches for row in batch.rows.tolist()]
        samples = [sample for batch in batches for sample in batch.samples]
        self.append({"step": step, "attempt": self.attempt, "rows": rows, "samples": samples})


@dataclass(frozen=True)
class Proof:
    """What the records show: every step used its own samples, each once."""

    steps: int
    samples: int
    undone: tuple[
        tuple[int, int], ...
    ]  # for every attempt after the first: the step it resumed from, steps repeated
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def redone(self) -> int:
        """How many steps were repeated because a fault rolled them back."""
        return sum(count for _, count in self.undone)


def prove(directory: Path, metrics: Sequence[dict[str, Any]], loader: Loader) -> Proof:
    """Compare the records with the order of samples. ``metrics``: the run's rows."""
    used: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for file in sorted(directory.glob("rank-*.jsonl")):
        for row in _rows(file):
            used.setdefault((row["step"], row["attempt"]), []).extend(
                zip(row["rows"], row["samples"], strict=True)
            )
    problems = []
    for row in metrics:
        found = sorted(used.get((row["step"], row["attempt"]), []))
        wanted = list(enumerate(loader.used(row["step"])))
        if found != wanted:
            problems.append(
                f"step {row['step']}: {len(found)} samples used, {len(set(found) & set(wanted))} of them right"
            )
    samples = sum(loader.clock.at(row["step"]) for row in metrics)
    return Proof(len(metrics), samples, tuple(_undone(directory)), tuple(problems))


def _undone(directory: Path) -> list[tuple[int, int]]:
    """For every attempt that did a step: the step it resumed from and how many of the first rank's steps it
    repeated.
    """
    attempts: dict[str, list[int]] = {}
    for row in _rows(directory / "rank-00000.jsonl"):
        attempts.setdefault(row["attempt"], []).append(row["step"])
    every = list(attempts.values())
    return [(later[0] - 1, sum(step >= later[0] for step in done)) for done, later in pairwise(every)]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        # A line torn by a fault belongs to a step that did not count.
        with contextlib.suppress(ValueError):
            yield json.loads(line)
