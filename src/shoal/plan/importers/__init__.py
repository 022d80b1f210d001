"""Import another stack's settings as a Shoal config; list what has no counterpart and what the engine will refuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.facts.cluster import notation
from shoal.facts.config import Config
from shoal.facts.config.check import explain
from shoal.facts.config.file import flatten
from shoal.facts.model import Model
from shoal.facts.problem import BadInput
from shoal.plan.importers import accelerate, deepspeed, megatron, nemo, sagemaker, torchtitan, trainer
from shoal.plan.importers.launch_line import LaunchLine
from shoal.plan.importers.reading import Reading
from shoal.plan.importers.sources import FORMS, ForeignSource, find_source, read_table


@dataclass
class Imported:
    """The tables of a Shoal config, notes on what had no counterpart, and a shape that no preset has."""

    tables: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    shape: Model | None = None


def read_foreign(path: Path, gpus: int | None = None, on: str | None = None) -> Imported:
    """A file's settings as a Shoal config. ``FILE.py:NAME`` selects one of several dictionaries in a Python file.

    ``gpus`` or the cluster ``on`` give the number of ranks, if the file does not.
    """
    if gpus is not None and gpus < 1:
        raise BadInput(f"--gpus {gpus}: must be 1 or more", "--gpus 8")
    world = gpus if gpus is not None or on is None else notation.find(on).devices
    place, colon, name = str(path).rpartition(":")
    file, name = (Path(place), name) if colon and name.isidentifier() and place else (path, "")
    source = find_source(file, name)
    line = source.line
    values = {key.replace("_", "-"): value for key, value in line.options.items()} if line else source.values
    spell = (lambda key: f"--{key}") if line else str
    reading = Reading(_switched(values) if source.kind == "megatron" else values, str(file), spell=spell)
    try:
        imported = _read(reading, source, file, world)
    except BadInput:
        # Errors that follow from an unreadable value are meaningless.
        if not reading.problems:
            raise
    if reading.problems:
        raise BadInput(reading.problems)
    imported.notes = [*_warnings(source), *reading.notes, *reading.left()]
    if on is not None:
        imported.tables["cluster"] = {"on": on}
    try:
        Config.model_validate(imported.tables)
    except ValidationError as error:
        raise BadInput(explain(error, {key: str(file) for key in flatten(imported.tables)})) from None
    return imported


def _read(reading: Reading, source: ForeignSource, path: Path, world: int | None) -> Imported:
    """Dispatch on the stack that the settings belong to."""
    world = world or (source.line.ranks if source.line else None)
    if source.kind == "megatron":
        return _with_shape(megatron.read(reading, world))
    if source.kind == "nemo" and source.script is not None:
        return _with_shape(nemo.read(source.script, str(path), world, reading))
    if source.kind == "torchtitan":
        return Imported(torchtitan.read(reading, world))
    if source.kind == "sagemaker":
        return Imported(sagemaker.read(reading, world, _estimator(source)))
    if source.line is not None:
        return Imported(_launched(reading, source.line, source.kind, path, world))
    if source.kind == "accelerate":
        return Imported(accelerate.read(reading, world, lambda name: _beside(reading, path, name)))
    return Imported(deepspeed.read(reading, world))


def _with_shape(found: tuple[dict[str, Any], Model | None]) -> Imported:
    tables, shape = found
    return Imported(tables, shape=shape)


def _switched(values: dict[str, Any]) -> dict[str, Any]:
    """A word after an option without a value is an unset shell variable, not its value."""
    return {key: True if key in megatron.SWITCHES else value for key, value in values.items()}


def _beside(reading: Reading, path: Path, name: str) -> Reading:
    return Reading(read_table(path.parent / name), name, reading.problems)


def _estimator(source: ForeignSource) -> dict[str, Any]:
    """Instances and hyperparameters: keywords of the call that receives the distribution, or names in the file."""
    script = source.script
    if script is None:
        return {}
    wanted = ("instance_type", "instance_count", "hyperparameters")
    said = {key: script.values[key] for key in wanted if key in script.values}
    for call in script.calls:
        if "distribution" in call.keywords or "instance_type" in call.keywords:
            said |= {key: call.keywords[key] for key in wanted if key in call.keywords}
    return said


def _launched(reading: Reading, line: LaunchLine, kind: str, path: Path, world: int | None) -> dict[str, Any]:
    """A command line of ``accelerate launch`` or ``deepspeed``: the file it names, and the script's arguments."""
    options = dict(line.options)
    reading.skip(*(key.replace("_", "-") for key in options))
    name = options.pop("deepspeed_config", None) or options.pop("deepspeed", None)
    script = trainer.read(options, reading.source, reading)
    if kind == "deepspeed":
        if not isinstance(name, str):
            raise BadInput(f"{path}: --deepspeed names no file", "--deepspeed ds_config.json there")
        file = _beside(reading, path, name)
        tables = deepspeed.read(file, world, script)
    else:
        name = line.before.get("config-file")
        if not isinstance(name, str):
            raise BadInput(f"{path}: accelerate launch names no file", "--config_file accelerate.yaml there")
        file = _beside(reading, path, name)
        tables = accelerate.read(
            file, world, lambda inner: _beside(reading, (path.parent / name), inner), script
        )
    reading.notes += [f"{name}: {note}" for note in (*file.notes, *file.left())]
    for table, values in script.tables.items():
        tables[table] = {**tables.get(table, {}), **values}
    return tables


def _warnings(source: ForeignSource) -> list[str]:
    found = []
    if source.conditions:
        found.append("the script has conditions: all their branches were read as one, so check the layout")
    if source.line is not None and source.line.twice:
        names = ", ".join(f"--{name}" for name in source.line.twice)
        found.append(f"given twice with two values: {names}; the last one holds, as there")
    return found


__all__ = ["FORMS", "Imported", "read_foreign"]
