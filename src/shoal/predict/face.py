"""``shoal.predict``: memory and time of one layout, from names or values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.facts import clusters, presets
from shoal.facts.cluster import Cluster
from shoal.facts.layout import Layout
from shoal.facts.ledger import Ledger
from shoal.facts.legality import check
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe
from shoal.predict.memory import ledger
from shoal.predict.question import Question
from shoal.predict.step import Step, step


@dataclass(frozen=True)
class Prediction:
    """What a step of one layout takes."""

    question: Question
    memory: Ledger
    step: Step


def predict(
    model: str | Model, on: str | Cluster, layout: str | Layout, *, seq: int, batch: int, **recipe: Any
) -> Prediction:
    """Memory ledger and time ledger; raises ``BadInput`` where the layout is not legal there."""
    question = Question(
        presets.find(model) if isinstance(model, str) else model,
        clusters.find(on) if isinstance(on, str) else on,
        Recipe.model_validate({"precision": "bf16", **recipe, "seq": seq, "batch": batch}),
        Layout.parse(layout) if isinstance(layout, str) else layout,
    )
    check(question.layout, question.model, question.recipe, question.cluster)
    return Prediction(question, ledger(question), step(question))
