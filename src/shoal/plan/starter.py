"""A first config for a model, data and a cluster: planned, with the usual settings for such a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.facts import support
from shoal.facts.cluster import Cluster, notation
from shoal.facts.config import Config
from shoal.facts.config.check import explain
from shoal.facts.config.paths import seen_from
from shoal.facts.layout import Layout, nearest
from shoal.facts.layout.legality import nearest_multiple
from shoal.facts.model import Model, hub, presets
from shoal.facts.problem import BadInput, Problem, seek
from shoal.facts.recipe import Recipe
from shoal.plan.decide import duration
from shoal.plan.explain import GIB
from shoal.plan.judge import Plan, ask, judge
from shoal.plan.request import RATE_OF_WIDE, WIDE
from shoal.plan.resolve import choose
from shoal.predict.workload import Workload

# For pretrained weights; a new network of that width takes ten times as much.
RATE_OF_TRAINED = 2e-5
# Tokens per sequence if the model supports more, and sequences per device.
USUAL_SEQ, USUAL_SHARE = 4096, 2


@dataclass(frozen=True)
class Wish:
    """What a config is requested to have; None is derived."""

    model: str = "tiny"
    data: str = "stdlib"
    on: str = "local"
    seq: int | None = None
    batch: int | None = None
    steps: int | None = None
    layout: str | None = None
    rows: dict[str, Any] = field(default_factory=dict)  # from the data's first row: format, field


@dataclass(frozen=True)
class Started:
    """The tables of a config, lines for its top, and its prediction."""

    tables: dict[str, Any]
    head: list[str]
    plan: Plan


def start(wish: Wish, folder: Path, visible: str | None = None) -> Started:
    """A config in ``folder`` that trains; raises BadInput with everything wrong with the wish."""
    problems: list[Problem] = []
    model = seek("--model", lambda: presets.find(wish.model), problems)
    cluster = seek("--on", lambda: notation.find(wish.on, visible), problems)
    if model is None or cluster is None:
        raise BadInput(problems)
    table = model_table(wish.model, folder)
    recipe = _recipe(wish, model, cluster, trained="init_from" in table)
    tables: dict[str, Any] = {
        "layout": wish.layout or "auto",
        "model": table,
        "data": {"source": data_source(wish.data, folder), **wish.rows},
        "recipe": recipe,
        "cluster": {"on": seen_from(folder, wish.on) if wish.on.lower().endswith(".toml") else wish.on},
    }
    config = checked(tables)
    if wish.layout is None:
        tables["layout"] = str(choose(config, cluster, model))
        config = checked(tables)
    problems = refusals(config, model, cluster)
    if problems:
        raise BadInput(problems)
    plan = predicted(config, model, cluster)
    return Started(tables, _head(wish, plan), plan)


def model_table(text: str, folder: Path) -> dict[str, Any]:
    """The ``[model]`` table for what a user calls a model, with its weights if it has some."""
    if text.lower() in presets.PRESETS:
        return {"preset": text.lower()}
    if hub.is_hub_name(text):
        return {"init_from": text}
    path = Path(text).expanduser()
    weights = path.is_dir() and (any(path.glob("*.safetensors")) or not (path / presets.CONFIG).exists())
    return {"init_from" if weights else "path": seen_from(folder, text)}


def checked(tables: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        raise BadInput(explain(error, {})) from None


def refusals(config: Config, model: Model | None, cluster: Cluster | None) -> list[Problem]:
    """What ``shoal train`` would reject: unsupported by the engine, or illegal there."""
    if config.layout == "auto":
        return support.missing(config, model, Layout())
    layout = Layout.parse(config.layout)
    found = support.missing(config, model, layout)
    if model is not None:
        found += nearest.problems(layout, model, config.recipe, cluster, config.run.strict, support.runs)
    return found


def predicted(config: Config, model: Model, cluster: Cluster) -> Plan:
    layout = Layout.parse(config.layout)
    return judge(
        Workload(
            model,
            cluster,
            config.recipe,
            layout,
            tune=config.tune,
            lora=config.model.lora,
            compile=config.compile.enabled,
        )
    )


def prediction(plan: Plan) -> str:
    """One line for the top of a config."""
    memory = plan.memory
    fits = "" if plan.fits else ", which does NOT fit"
    return (
        f"Predicted: {duration(plan.step.seconds)}/step ± {plan.error_bar:.0%}, "
        f"{plan.tokens_per_s_per_gpu:,.0f} tokens/s/device, "
        f"{memory.peak_allocated / GIB:.3g} GiB allocated of {memory.capacity / GIB:.3g}{fits}."
    )


def usual_seq(model: Model) -> int:
    """Tokens per sequence: the default for the tiny model, and more for models made for more."""
    small = Recipe.model_fields["seq"].default
    return min(model.max_positions, USUAL_SEQ if model.hidden >= WIDE else small)


def usual_batch(cluster: Cluster) -> int:
    wanted = max(Recipe.model_fields["batch"].default, USUAL_SHARE * cluster.devices)
    return nearest_multiple(wanted, cluster.devices)


def usual_rate(model: Model, trained: bool) -> float | None:
    """A learning rate; None if the default fits."""
    if trained:
        return RATE_OF_TRAINED
    return RATE_OF_WIDE if model.hidden >= WIDE else None


def _recipe(wish: Wish, model: Model, cluster: Cluster, trained: bool) -> dict[str, Any]:
    recipe: dict[str, Any] = {
        "seq": usual_seq(model) if wish.seq is None else wish.seq,
        "batch": usual_batch(cluster) if wish.batch is None else wish.batch,
        "precision": "fp32" if cluster.device.name == "cpu" else "bf16",
    }
    if wish.steps is not None:
        recipe["steps"] = wish.steps
    if (rate := usual_rate(model, trained)) is not None:
        recipe["lr"] = rate
    return recipe


def data_source(text: str, folder: Path) -> str:
    """The data source as written in a config in ``folder``, given relative to the working directory."""
    return text if text == "stdlib" or "://" in text else seen_from(folder, text)


def _head(wish: Wish, plan: Plan) -> list[str]:
    layout = "The layout is yours" if wish.layout else "The layout is what the planner chooses"
    return [
        f"Written by shoal init for {wish.model} on {wish.on}. What is commented out is at its default.",
        prediction(plan),
        f"{layout}; shoal plan {ask(plan.workload, wish.model)} shows the others.",
        "Set the learning rate and the length of the run (recipe.lr, recipe.steps) to suit your data.",
    ]
