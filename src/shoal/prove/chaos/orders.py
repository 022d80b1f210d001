"""Orders: how a campaign tells a rank to fail and learns that it did; files, so no fault can lose them.

Needs no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

# The function itself: a saboteur may replace the one in its module.
from time import time as now
from typing import Any

from shoal.train.files import replace_text


@dataclass(frozen=True)
class FaultOrder:
    """Strike ``rank`` at ``point`` of a step. ``after``: only in a process that began after that order struck."""

    number: int
    kind: str
    rank: int
    point: str
    seed: int
    after: int | None = None


class Orders:
    """A directory of orders, and one of executed orders."""

    def __init__(self, run: Path) -> None:
        # Beside the run, whose own directory is left alone.
        self.path = run.with_name(f"{run.name}.chaos")
        self.waiting, self.struck = self.path / "waiting", self.path / "struck"
        self.log = self.path / "launcher.log"

    def prepare(self) -> None:
        for directory in (self.waiting, self.struck):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def give(self, order: FaultOrder) -> None:
        replace_text(self.waiting / f"{order.number}.json", json.dumps(asdict(order)))

    def for_rank(self, rank: int, began: float) -> list[FaultOrder]:
        """Orders for a process that began at ``began``, at any point."""
        found = []
        for path in sorted(self.waiting.glob("*.json")):
            try:
                order = FaultOrder(**json.loads(path.read_text()))
            except FileNotFoundError:
                continue
            before = None if order.after is None else self.strike_of(order.after)
            due = order.after is None or (before is not None and before["time"] <= began)
            if order.rank == rank and due:
                found.append(order)
        return found

    def strike(self, order: FaultOrder, step: int, point: str, committed: int) -> None:
        """Report the order as done, then execute it: this process may be dead a moment later.

        ``committed``: the last safe step now. The campaign may learn of it long after the run has recovered.
        """
        found = {
            **asdict(order),
            "step": step,
            "struck_at": point,
            "committed": committed,
            "time": now(),
            "process": os.getpid(),
        }
        replace_text(self.struck / f"{order.number}.json", json.dumps(found))
        (self.waiting / f"{order.number}.json").unlink(missing_ok=True)

    def add(self, order: FaultOrder, **more: Any) -> None:
        """Add the result, if the struck process lives to report it."""
        found = self.strike_of(order.number) or {}
        replace_text(self.struck / f"{order.number}.json", json.dumps({**found, **more}))

    def strike_of(self, number: int) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = json.loads((self.struck / f"{number}.json").read_text())
        except FileNotFoundError:
            return None
        return content
