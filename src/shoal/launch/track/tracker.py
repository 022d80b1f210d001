"""What a tracker is to the launcher, and which ones there are."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run. No secrets: the config is redacted before it gets here."""

    path: Path
    project: str | None  # None: as the tracker's own settings have it, else "shoal"
    id: str  # drawn when the run began
    steps: int
    layout: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name


class Held(NamedTuple):
    """What a tracker holds of a run: under which id, up to which step."""

    id: str | None = None
    step: int = 0


class Tracker(Protocol):
    """One tracker's side of a run. Any exception is a failure of the tracker, and never one of the run."""

    def open(self, run: TrackedRun, held: Held) -> Held:
        """Begin, or continue what ``held`` names. What is there: it may be more than was noted before a kill."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step. Steps come once, in order."""

    def flush(self) -> None:
        """What was logged outlives this process."""

    def attach(self, path: Path) -> None:
        """A file of the run: its plan, its config, its report."""

    def close(self, finished: bool) -> None:
        """``finished``: the run has done all of its steps. Otherwise it may be opened again."""


class Kind(NamedTuple):
    """Where the adapter is, and the distributions that it needs: of each row any one."""

    adapter: str
    needs: tuple[tuple[str, ...], ...]
    install: str


TRACKERS: Mapping[str, Kind] = {
    "tensorboard": Kind(
        "shoal.launch.track.tensorboard:TensorBoard", (("tensorboard",),), "pip install 'tensorboard>=2.16'"
    ),
    "wandb": Kind("shoal.launch.track.wandb:WeightsAndBiases", (("wandb",),), "pip install 'wandb>=0.17'"),
    "mlflow": Kind(
        "shoal.launch.track.mlflow:MLflow",
        # The skinny package leaves out what a database needs; one is kept where no server is named.
        (("mlflow-skinny", "mlflow"), ("sqlalchemy",), ("alembic",)),
        "pip install 'mlflow-skinny>=2.14' sqlalchemy alembic",
    ),
    "trackio": Kind("shoal.launch.track.trackio:Trackio", (("trackio",),), "pip install 'trackio>=0.2'"),
}
PROJECT = "shoal"


def new_tracker(name: str) -> Tracker:
    module, _, kind = TRACKERS[name].adapter.partition(":")
    tracker: Tracker = getattr(importlib.import_module(module), kind)()
    return tracker


# Of a row: what counts its place, and what is another's number in other words.
_LEFT_OUT = {"step", "compared", "loss_hex"}


def values_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl under their own names; those of a table as ``validation/NAME``."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if name in _LEFT_OUT:
            continue
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        for part, number in parts:
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                found[name if part is None else f"{name}/{part}"] = float(number)
    return found
