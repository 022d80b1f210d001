"""The interface of trackers, and the list of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets to know of a run. No secrets: the config is redacted before."""

    path: Path
    project: str | None  # None: the tracker's own setting, else "shoal"
    id: str  # drawn when the run began
    steps: int
    layout: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name


class Held(NamedTuple):
    """What a tracker has of a run: its id there, and the last step."""

    id: str | None = None
    step: int = 0


class Tracker(Protocol):
    """One tracker's side of a run. Any exception is a failure of the tracker, never of the run."""

    def open(self, run: TrackedRun, held: Held) -> Held:
        """Begin, or continue ``held``. Returns what the tracker has, which may be more than was recorded before a
        kill.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a step. Steps come once, in order."""

    def flush(self) -> None:
        """Afterwards, what was logged outlives this process."""

    def attach(self, path: Path) -> None:
        """A file of the run: its plan, config or report."""

    def close(self, finished: bool) -> None:
        """``finished``: the run has done all of its steps. Otherwise it may be opened again."""


class Kind(NamedTuple):
    """The adapter's module, and the packages it needs: one from each row."""

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
        # The skinny package lacks what a database needs, which is used if no server is named.
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


# Fields of a row that give its position, or repeat another number in other words.
_LEFT_OUT = {"step", "compared", "loss_hex"}


def values_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of a row of metrics.jsonl; those of a table as ``validation/NAME``."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if name in _LEFT_OUT:
            continue
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        for part, number in parts:
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                found[name if part is None else f"{name}/{part}"] = float(number)
    return found
