"""Convert another stack's settings to a commented config: read, override, check by the engine's rules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.facts.cluster import notation
from shoal.facts.config.paths import seen_from
from shoal.facts.model import Model, hub, presets
from shoal.facts.model.huggingface import write_config
from shoal.facts.problem import BadInput, Problem
from shoal.facts.recipe import Recipe
from shoal.plan.commented import commented
from shoal.plan.importers import Imported, read_foreign
from shoal.plan.starter import (
    checked,
    data_source,
    model_table,
    predicted,
    prediction,
    refusals,
    usual_rate,
)


@dataclass(frozen=True)
class Converted:
    """Files to write, notes on what had no counterpart, and what the engine will reject."""

    files: dict[Path, str]
    notes: list[str]
    refused: list[Problem]


def convert(
    path: Path,
    source: Path,
    gpus: int | None,
    said: dict[str, Any],
    rows: dict[str, Any],
    visible: str | None = None,
) -> Converted:
    """The config ``path`` for the settings in ``source``, and next to it the model, if no preset has its shape.

    ``said`` overrides the file: model, data, on, seq, batch, steps, layout. ``rows``: what the data's first row tells
    about all rows.
    """
    imported = read_foreign(source, gpus, said.get("on"))
    tables = imported.tables
    model, files = _model(imported, path, said)
    if "data" in said:
        tables["data"] = {"source": data_source(said["data"], path.parent), **rows}
    recipe = tables["recipe"]
    recipe |= {key: said[key] for key in ("seq", "batch", "steps") if key in said}
    if "steps" in said:
        recipe.pop("epochs", None)
    tables["layout"] = said.get("layout", tables["layout"])
    notes = [*imported.notes, *_completed(tables, model)]
    config = checked(tables)
    cluster = notation.find(config.cluster.on, visible)
    refused = refusals(config, model, cluster)
    head = [f"Read from {source.name} by shoal init --from. What is commented out is at its default."]
    if missing := [name for name in ("model", "data") if name not in tables]:
        head.append(
            f"The file names no {' and no '.join(missing)} that is known here: see [{missing[0]}] below."
        )
    if model is not None and not refused:
        head.append(prediction(predicted(config, model, cluster)))
    text = commented(tables, [*head, *(f"- {note}" for note in notes)], refused)
    return Converted({path: text, **files}, notes, refused)


def _model(imported: Imported, path: Path, said: dict[str, Any]) -> tuple[Model | None, dict[Path, str]]:
    """The model, if known without network access, and the file with a custom shape."""
    tables, folder = imported.tables, path.parent
    if "model" in said:
        tables["model"] = model_table(said["model"], folder)
        return presets.find(said["model"]), {}
    if imported.shape is not None:
        file = path.with_name(f"{path.stem}.model.json")
        tables["model"] = {"path": file.name}
        return imported.shape, {file: json.dumps(write_config(imported.shape), indent=2) + "\n"}
    table = tables.get("model", {})
    if "preset" in table:
        return presets.find(table["preset"]), {}
    if "init_from" not in table or hub.is_hub_name(table["init_from"]):
        return None, {}
    named = table["init_from"]
    table["init_from"] = seen_from(folder, named)
    try:
        return presets.at(named), {}
    except BadInput:
        return None, {}  # a location on another machine


def _completed(tables: dict[str, Any], model: Model | None) -> list[str]:
    """Add a suitable learning rate if the file has none; list what else the file does not hold."""
    recipe = tables["recipe"]
    notes = []
    trained = "init_from" in tables.get("model", {})
    if "lr" not in recipe and model is not None and (rate := usual_rate(model, trained)) is not None:
        recipe["lr"] = rate
        notes.append(f"recipe.lr = {rate} was put in, which suits such a model")
    wanted = ["seq", "lr"] if recipe.keys() & {"steps", "epochs", "tokens"} else ["seq", "lr", "steps"]
    missing = [f"recipe.{key} = {Recipe.model_fields[key].default}" for key in wanted if key not in recipe]
    if missing:
        notes.append(f"not in the file, so Shoal's default holds: {', '.join(missing)}")
    return notes
