"""Measured steps of runs that tried several layouts: one JSON file per kind of device in ``calibration/steps/``.

They are of whole runs on a machine at hand. The next search for the fastest layout of the same work starts from what
the last one learned.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from pydantic import Field

from shoal.facts.cluster import Cluster
from shoal.facts.cluster.devices import Count, Hardware, Positive
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe

# Recipe fields that do not affect a step's time.
TIMELESS = {
    *("steps", "tokens", "epochs", "lr", "schedule", "warmup", "decay", "seed", "weight_decay", "batch_ramp"),
    *("beta1", "beta2", "eps", "adamw_lr", "lr_min", "lr_reference_batch"),
}
# A file keeps this many steps, the latest ones.
MOST = 1000


class MeasuredStep(Hardware):
    """The median of some steps in one layout, with the prediction."""

    work: str  # what all layouts have in common: see ``work_of``
    model: str  # its name, for the reader
    cluster: str
    layout: str
    seconds: Positive
    predicted: Positive
    samples: Count
    date: str  # ISO 8601, UTC


class StoredSteps(Hardware):
    """All steps measured on devices of one kind, latest last."""

    format: int
    device: str
    steps: Annotated[tuple[MeasuredStep, ...], Field(max_length=MOST)] = ()

    def with_more(self, steps: list[MeasuredStep]) -> StoredSteps:
        """For the same work in the same layout, the latest counts."""
        found = {(one.work, one.layout): one for one in (*self.steps, *steps)}
        return self.model_copy(update={"steps": tuple(found.values())[-MOST:]})


_installed: dict[str, StoredSteps] = {}


def install(stored: StoredSteps) -> None:
    _installed[stored.device] = stored


def forget() -> None:
    _installed.clear()


def work_of(model: Model, cluster: Cluster, recipe: Recipe, more: dict[str, Any]) -> str:
    """An identifier of everything but the layout that determines the step time. ``more``: additions from the config."""
    said = {
        "model": model.model_dump(mode="json", exclude={"name"}),
        "cluster": cluster.model_dump(mode="json"),
        "recipe": recipe.model_dump(mode="json", exclude=TIMELESS),
        **more,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def known(device: str, work: str) -> dict[str, MeasuredStep]:
    """Measurements of this work here, by layout, fastest first."""
    steps = _installed[device].steps if device in _installed else ()
    return {one.layout: one for one in sorted(steps, key=lambda one: one.seconds) if one.work == work}
