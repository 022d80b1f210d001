"""A planning request: model, cluster and recipe, as names or values, validated together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shoal.facts.cluster import Cluster, notation
from shoal.facts.config import MOST_RANKS, Config, Lora, TuneSection
from shoal.facts.config.check import explain
from shoal.facts.layout import Layout, nearest
from shoal.facts.layout.legality import violations
from shoal.facts.model import Model, presets
from shoal.facts.problem import BadInput, Problem, seek
from shoal.facts.recipe import Recipe, read_count
from shoal.plan.headroom import Headroom, read_headroom
from shoal.predict.workload import USUAL, Workload

# The default learning rate suits the tiny model; wide networks diverge at it. It changes no cost, but is written into
# configs and exports.
WIDE = 1024
RATE_OF_WIDE = 3e-4

TOKENS = "a whole count such as --tokens 15T or --tokens 300M"


@dataclass(frozen=True)
class PlanRequest:
    """Everything but the layout; with one, only that is judged."""

    model: Model
    model_name: str  # as the user wrote it: a config must find it again
    cluster: Cluster
    recipe: Recipe
    layout: Layout | None = None
    lora: Lora | None = None
    tokens: int | None = None  # of the whole run
    price: float | None = None  # of a GPU for an hour
    tune: TuneSection = USUAL
    compile: bool | None = None  # as compile.enabled
    headroom: Headroom | None = None  # that every plan leaves; None: the usual, of what is chosen

    def workload(self, layout: Layout) -> Workload:
        return Workload(
            self.model,
            self.cluster,
            self.recipe,
            layout,
            tune=self.tune,
            lora=self.lora,
            compile=self.compile,
        )


def plan_request(
    model: str | Model,
    on: str | Cluster,
    *,
    seq: int,
    batch: int,
    layout: str | Layout | None = None,
    lora: int | None = None,
    tokens: str | int | None = None,
    price: float | None = None,
    visible: str | None = None,
    headroom: str | float | Headroom | None = None,
    **recipe: Any,
) -> PlanRequest:
    """Names looked up, values checked; everything wrong is reported together.

    ``recipe`` takes further fields of a recipe; bf16 unless said otherwise. ``lora`` is the rank of low-rank additions,
    ``headroom`` device memory that stays free: a share of it, or a size such as ``8GiB``.
    """
    problems: list[Problem] = []
    found_model = model if isinstance(model, Model) else seek("model", lambda: presets.find(model), problems)
    cluster = on if isinstance(on, Cluster) else seek("--on", lambda: notation.find(on, visible), problems)
    total = _tokens(tokens, problems)
    values = {"precision": "bf16", **recipe, "seq": seq, "batch": batch}
    if found_model is not None and found_model.hidden >= WIDE:
        values.setdefault("lr", RATE_OF_WIDE)
    if total is not None:
        values["tokens"] = total
    found_recipe = _recipe(values, problems)
    if price is not None and not (math.isfinite(price) and price > 0):
        problems.append(Problem(f"--price {price}: must be above 0", "--price 2.5, per GPU-hour"))
    if lora is not None and not 1 <= lora <= MOST_RANKS:
        problems.append(Problem(f"--lora {lora}: must be from 1 to {MOST_RANKS}", "--lora 16"))
    keep: Headroom | None = None
    if isinstance(headroom, Headroom):
        keep = headroom
    elif headroom is not None:
        keep = seek("", lambda: read_headroom(str(headroom)), problems)
    chosen: Layout | None = None
    if isinstance(layout, str):
        chosen = seek("", lambda: Layout.parse(layout), problems)
    elif layout is not None:
        chosen = layout
    if found_model and cluster and found_recipe:
        problems += _legal(found_model, cluster, found_recipe, chosen)
    if problems or found_model is None or cluster is None or found_recipe is None:
        raise BadInput(problems)
    name = model if isinstance(model, str) else model.name
    adapters = Lora(rank=lora, alpha=2.0 * lora) if lora else None
    return PlanRequest(
        found_model, name, cluster, found_recipe, chosen, adapters, total, price, headroom=keep
    )


def _recipe(values: dict[str, Any], problems: list[Problem]) -> Recipe | None:
    try:
        return Config.model_validate({"recipe": values}).recipe
    except ValidationError as error:
        problems.extend(explain(error, {}))
        return None


def _tokens(written: str | int | None, problems: list[Problem]) -> int | None:
    if written is None:
        return None
    try:
        count = read_count(written) if isinstance(written, str) else written
    except ValueError as error:
        problems.append(Problem(f"--tokens: {error}", TOKENS))
        return None
    if not 1 <= count <= 10**18:
        problems.append(Problem(f"--tokens {written}: must be from 1 to 1e18", TOKENS))
        return None
    return count


def _legal(model: Model, cluster: Cluster, recipe: Recipe, layout: Layout | None) -> list[Problem]:
    """What stands against a layout; without one, against every layout: a sequence longer than learned positions."""
    if layout is not None:
        return nearest.problems(layout, model, recipe, cluster)
    return violations(Layout(), model, recipe) if model.positions == "learned" else []
