"""Import a DeepSpeed JSON or Accelerate YAML as a Shoal config; list what has no counterpart."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.facts.cluster import notation
from shoal.facts.config import Config, describe
from shoal.facts.config.check import explain, shorten, toml_value
from shoal.facts.config.file import flatten, template
from shoal.facts.input.other_files import explain as explain_other
from shoal.facts.input.other_files import kind_of
from shoal.facts.input.untrusted_files import check_plain, parse_json, read_settings
from shoal.facts.problem import BadInput
from shoal.plan.importers import accelerate, deepspeed
from shoal.plan.importers.reading import Reading

FORMS = (
    "a DeepSpeed config (JSON, with train_batch_size or zero_optimization) or one of accelerate config (YAML)"
)


def read_foreign(
    path: Path, gpus: int | None = None, on: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The tables of a Shoal config, and notes on what had no counterpart.

    ``gpus`` or the cluster ``on`` say how many ranks there are, where the file does not.
    """
    if gpus is not None and gpus < 1:
        raise BadInput(f"--gpus {gpus}: must be 1 or more", "--gpus 8")
    world = gpus if gpus is not None or on is None else notation.find(on).devices
    values = _parse(path)
    reading = Reading(values, str(path))
    try:
        tables = _read(reading, values, path, world)
    except BadInput:
        # What follows from a value that could not be read says nothing.
        if not reading.problems:
            raise
    if reading.problems:
        raise BadInput(reading.problems)
    notes = [*reading.notes, *reading.left()]
    if on is not None:
        tables["cluster"] = {"on": on}
    try:
        Config.model_validate(tables)
    except ValidationError as error:
        raise BadInput(explain(error, {key: str(path) for key in flatten(tables)})) from None
    return tables, notes


def _read(reading: Reading, values: dict[str, Any], path: Path, world: int | None) -> dict[str, Any]:
    """By whichever of the two wrote the file."""
    kind = kind_of(values)
    if kind == "accelerate":

        def beside(name: str) -> Reading:
            return Reading(_parse(path.parent / name), name, reading.problems)

        return accelerate.read(reading, world, beside)
    if kind == "deepspeed":
        return deepspeed.read(reading, world)
    if kind is not None:
        raise explain_other(kind, path, values)
    raise BadInput(f"{path} is neither a DeepSpeed nor an Accelerate config", FORMS)


def render(tables: dict[str, Any], notes: list[str], source: str) -> str:
    """A complete config: what was read is set, everything else stands commented out at its default."""
    given = flatten(tables)
    lines = [
        f"# Read from {_one_line(source)} by shoal init --from. Nothing there names model or data: see below."
    ]
    lines += [f"# - {_one_line(note)}" for note in notes]
    section = ""
    for line in template().splitlines()[1:]:
        if header := re.fullmatch(r"\[(.+)\]", line):
            section = f"{header[1]}."
        name = re.match(r"# (\w+) =", line)
        key = section + name[1] if name else ""
        if name and key in given:
            pair = f"{name[1]} = {toml_value(given[key])}"
            line = f"{pair:<38} # {describe(key)}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = read_settings(path)
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}", FORMS) from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}", FORMS) from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8", FORMS) from None
    except ValueError as error:
        raise BadInput(f"cannot read {path}: {error}", FORMS) from None
    if path.suffix.lower() in (".yaml", ".yml"):
        values = _parse_yaml(text, path)
    else:
        try:
            values = parse_json(text)
        except ValueError as error:
            raise BadInput(
                f"{path} is not valid JSON: {error}", f"{FORMS}; a YAML file ends in .yaml"
            ) from None
    if not isinstance(values, dict):
        raise BadInput(f"{path} holds {shorten(repr(values))}, not a table of settings", FORMS)
    return values


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        yaml = importlib.import_module("yaml")  # comes with transformers, not with Shoal alone
    except ImportError:
        raise BadInput(f"reading {path} needs PyYAML, which is not installed", "pip install pyyaml") from None
    try:
        values = yaml.safe_load(text)
        check_plain(values)
        return values
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid YAML: {_one_line(str(error))}", FORMS) from None
