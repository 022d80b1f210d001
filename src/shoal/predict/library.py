"""``shoal.predict``: memory and time of one layout, from names or values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.facts.cluster import Cluster, notation
from shoal.facts.layout import Layout
from shoal.facts.layout.legality import check
from shoal.facts.ledger import Ledger
from shoal.facts.model import Model, presets
from shoal.facts.recipe import Recipe
from shoal.predict.memory import ledger
from shoal.predict.time.step import StepTime, step
from shoal.predict.workload import Workload


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one step in one layout."""

    workload: Workload
    memory: Ledger
    step: StepTime


def predict(
    model: str | Model, on: str | Cluster, layout: str | Layout, *, seq: int, batch: int, **recipe: Any
) -> Prediction:
    """Memory ledger and time ledger; raises ``BadInput`` where the layout is not legal there."""
    workload = Workload(
        presets.find(model) if isinstance(model, str) else model,
        notation.find(on) if isinstance(on, str) else on,
        Recipe.model_validate({"precision": "bf16", **recipe, "seq": seq, "batch": batch}),
        Layout.parse(layout) if isinstance(layout, str) else layout,
    )
    check(workload.layout, workload.model, workload.recipe, workload.cluster)
    return Prediction(workload, ledger(workload), step(workload))
