"""A planning request: model, cluster and recipe, as names or values, validated together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shoal.facts.cluster import Cluster, notation, precisions
from shoal.facts.cluster.stack import SHOAL, STACKS, Stack
from shoal.facts.config import MOST_RANKS, Config, Lora, TuneSection
from shoal.facts.config.check import explain
from shoal.facts.layout import Layout, nearest
from shoal.facts.layout.legality import violations
from shoal.facts.layout.stack_limits import RECIPES
from shoal.facts.model import Model, presets
from shoal.facts.model.parameters import active_parameter_count, attention_projections
from shoal.facts.problem import BadInput, Problem, did_you_mean, seek
from shoal.facts.recipe import Recipe, read_count
from shoal.plan import compute_optimal
from shoal.plan.amounts import read_budget, read_deadline
from shoal.plan.headroom import Headroom, read_headroom
from shoal.plan.unspecified import device_alone, lacking, pretraining_batch, pretraining_seq
from shoal.predict.workload import USUAL, Workload

# The default learning rate fits the tiny model; wide networks diverge at it. It changes no cost, but is written into
# configs and exports.
WIDE = 1024
RATE_OF_WIDE = 3e-4

TOKENS = "a whole count such as --tokens 15T or --tokens 300M; or --tokens optimal"


@dataclass(frozen=True)
class PlanRequest:
    """Everything but the layout; if one is given, only that is judged."""

    model: Model
    model_name: str  # as the user wrote it, so that a config finds it again
    cluster: Cluster
    recipe: Recipe
    layout: Layout | None = None
    lora: Lora | None = None
    tokens: int | None = None  # of the whole run
    price: float | None = None  # per GPU-hour
    tune: TuneSection = USUAL
    compile: bool | None = None  # as compile.enabled
    deadline: float | None = None  # maximum seconds of the run
    budget: float | None = None
    counted: bool = True  # whether the device count was given; if not, it is the question
    own_batch: bool = True  # whether the batch was given; if not, it is the usual one
    stack: Stack = SHOAL  # whose constraints and constants apply
    headroom: Headroom | None = None  # required of every plan; None: the usual one, for the choice

    def workload(self, layout: Layout) -> Workload:
        return Workload(
            self.model,
            self.cluster,
            self.recipe,
            layout,
            self.stack,
            tune=self.tune,
            lora=self.lora,
            compile=self.compile,
        )


def plan_request(
    model: str | Model,
    on: str | Cluster,
    *,
    seq: int | None = None,
    batch: int | None = None,
    layout: str | Layout | None = None,
    lora: int | None = None,
    dora: bool = False,
    nf4: bool = False,
    tokens: str | int | None = None,
    price: float | None = None,
    deadline: str | None = None,
    budget: str | None = None,
    visible: str | None = None,
    stack: str = "shoal",
    headroom: str | float | Headroom | None = None,
    **recipe: Any,
) -> PlanRequest:
    """Look up names and validate values; all errors are reported together.

    ``recipe`` takes further fields of a recipe; bf16 by default, fp16 if a device has no bf16. ``lora``: the rank of
    the adapters; ``dora`` also trains row lengths, ``nf4`` stores frozen weights in 4 bits. ``headroom``: device
    memory to leave free, as a share or a size such as ``8GiB``.
    """
    problems: list[Problem] = []
    found_model = model if isinstance(model, Model) else seek("model", lambda: presets.find(model), problems)
    counted = isinstance(on, Cluster) or not device_alone(on)
    on = on if isinstance(on, Cluster) or counted else f"1x{on.strip()}"
    cluster = on if isinstance(on, Cluster) else seek("--on", lambda: notation.find(on, visible), problems)
    total = _tokens(tokens, found_model, problems)
    seconds = read_deadline(deadline, problems) if deadline is not None else None
    money = read_budget(budget, problems) if budget is not None else None
    problems += lacking(counted, layout, batch, tokens, price, deadline, budget)
    own_batch = batch is not None
    if seq is None:
        seq = pretraining_seq(found_model) if found_model else 1
    if batch is None:
        # What a deadline or a budget is enough for is not known yet, so take the batch of a compute-optimal run.
        length = total or (_tokens("optimal", found_model, problems) if deadline or budget else None)
        batch = (
            pretraining_batch(found_model, seq, length, cluster.devices)
            if found_model and cluster and length
            else 1
        )
    wanted = recipe.pop("precision", None) or (precisions.usual(cluster.device) if cluster else "bf16")
    if cluster is not None:
        problems += precisions.refused(cluster.device, wanted)
    values = {**recipe, "precision": wanted, "seq": seq, "batch": batch}
    if found_model is not None and found_model.hidden >= WIDE:
        values.setdefault("lr", RATE_OF_WIDE)
    if total is not None:
        values["tokens"] = total
    found_recipe = _recipe(values, problems)
    if price is not None and not (math.isfinite(price) and price > 0):
        problems.append(Problem(f"--price {price}: must be above 0", "--price 2.5, per GPU-hour"))
    if lora is not None and not 1 <= lora <= MOST_RANKS:
        problems.append(Problem(f"--lora {lora}: must be from 1 to {MOST_RANKS}", "--lora 16"))
    if stack not in STACKS:
        problems.append(Problem(f"--stack {stack}: unknown stack", did_you_mean(stack, tuple(STACKS))))
    problems += [
        Problem(f"--{flag} is of adapters, and there are none", f"--lora 16 --{flag}")
        for flag, given in (("dora", dora), ("nf4", nf4))
        if given and lora is None
    ]
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
    adapters = None
    if lora:
        kind, base = "dora" if dora else "lora", "nf4" if nf4 else "bf16"
        targets = list(attention_projections(found_model))
        adapters = Lora.model_validate(
            {"rank": lora, "alpha": 2.0 * lora, "kind": kind, "base": base, "targets": targets}
        )
    used = STACKS[stack]
    if refused := list(unsupported(stack, found_recipe, adapters)):
        raise BadInput(refused)
    # Buckets have the stack's size.
    tune = USUAL if used is SHOAL else TuneSection(bucket_mb=used.bucket_mb)
    return PlanRequest(
        found_model,
        name,
        cluster,
        found_recipe,
        chosen,
        adapters,
        total,
        price,
        deadline=seconds,
        budget=money,
        counted=counted,
        own_batch=own_batch,
        tune=tune,
        stack=used,
        headroom=keep,
    )


def unsupported(stack: str, recipe: Recipe, lora: Lora | None) -> Iterator[Problem]:
    """Recipe settings that another stack does not train with."""
    for (field, value), instead in RECIPES.get(stack, {}).items():
        if getattr(recipe, field) == value:
            yield Problem(f"--stack {stack}: it does not train with {field} {value}", f"--{field} {instead}")
    if lora is not None and stack in ("megatron", "torchtitan"):
        yield Problem(
            f"--stack {stack}: it has no adapters of its own", "--stack deepspeed, or without --lora"
        )


def _recipe(values: dict[str, Any], problems: list[Problem]) -> Recipe | None:
    try:
        return Config.model_validate({"recipe": values}).recipe
    except ValidationError as error:
        problems.extend(explain(error, {}))
        return None


def _tokens(written: str | int | None, model: Model | None, problems: list[Problem]) -> int | None:
    if written is None:
        return None
    if written == "optimal":
        return round(compute_optimal.tokens_for(active_parameter_count(model))) if model else None
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
    """Problems of a layout; without one, of every layout: a sequence longer than learned positions."""
    if layout is not None:
        return nearest.problems(layout, model, recipe, cluster)
    return violations(Layout(), model, recipe) if model.positions == "learned" else []
