"""Which config values are input paths, and what they are relative to.

Paths in a file are relative to the file's directory, those in ``--set`` to the working directory, as in any command.
Both become absolute when a config is loaded, so that a run's own config.toml works from anywhere. Output paths
(``run.dir`` and ``data.cache``) stay as they are, relative to the working directory.
"""

from __future__ import annotations

import copy
import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

from shoal.facts.config import Config, Lora, MixPart
from shoal.facts.model.hub import is_hub_name
from shoal.facts.model.presets import PRESETS

MAGIC = frozenset("*?[")


# Decides whether a value is a path: some may also be words.
INPUTS: dict[str, Callable[[str, Path], bool]] = {
    "model.preset": lambda text, base: text.lower() not in PRESETS and (base / text).exists(),
    "model.path": lambda text, base: not is_hub_name(text, base),
    "model.init_from": lambda text, base: not is_hub_name(text, base),
    "model.lora.init_from": lambda text, base: True,
    "data.source": lambda text, base: text != "stdlib",
    "data.tokenizer": lambda text, base: text != "bytes",
    "data.template": lambda text, base: text not in ("auto", "none"),
    "cluster.on": lambda text, base: text.strip().lower().endswith(".toml"),
}
SOURCE = "data.source"


def resolve_paths(values: dict[str, Any], base_of: Callable[[str], Path]) -> None:
    """Make a config's input paths absolute, in place; ``base_of``: a key's base directory."""
    for key, table, name in _given(values):
        table[name] = _absolute(key, table[name], base_of(key))
    data = values.get("data")
    mix = data.get("mix") if isinstance(data, dict) else None
    for part in mix if isinstance(mix, list) else ():
        for key in (SOURCE, "data.template"):
            name = key.partition(".")[2]
            if isinstance(part, dict) and isinstance(part.get(name), str):
                part[name] = _absolute(key, part[name], base_of("data.mix"))
    evaluate = values.get("evaluate")
    if isinstance(evaluate, dict):
        _resolve_validation(evaluate, base_of("evaluate.source"))


def _resolve_validation(evaluate: dict[str, Any], base: Path) -> None:
    given = evaluate.get("source")
    if isinstance(given, str):
        evaluate["source"] = _absolute(SOURCE, given, base)
    elif isinstance(given, dict):
        for name, text in given.items():
            given[name] = _absolute(SOURCE, text, base) if isinstance(text, str) else text


def with_absolute_paths(config: Config) -> Config:
    """A config created in a program, with its input paths absolute as if it had been loaded here."""
    values = config.model_dump(include={"model", "data", "cluster", "evaluate"})
    resolve_paths(values, lambda key: Path.cwd())
    values["data"]["mix"] = [MixPart.model_validate(part) for part in values["data"]["mix"]]
    if values["model"]["lora"] is not None:
        values["model"]["lora"] = Lora.model_validate(values["model"]["lora"])
    also = {"data": ["mix"], "evaluate": ["source"], "model": ["lora"]}
    changes = {
        section: getattr(config, section).model_copy(
            update={name: table[name] for name in (*_names(section), *also.get(section, []))}
        )
        for section, table in values.items()
    }
    return config.model_copy(update=changes)


def _names(section: str) -> list[str]:
    return [key.partition(".")[2] for key in INPUTS if key.startswith(section + ".") and key.count(".") == 1]


def seen_from(folder: Path, path: str) -> str:
    """A path relative to the working directory, as written in a config in this folder."""
    if Path(path).is_absolute() or path.startswith("~"):
        return path
    return os.path.relpath(Path.cwd().resolve() / path, folder.resolve())


def of_any_place(values: dict[str, Any]) -> dict[str, Any]:
    """A config's values with only the last part of each input path: equal on machines with different mounts."""
    kept = copy.deepcopy(values)
    for _, table, name in _given(kept):
        table[name] = PurePath(table[name]).name or table[name]
    return kept


def _given(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The input paths of a config: each one's key, its table and its name in the table."""
    for key in INPUTS:
        *sections, name = key.split(".")
        table: Any = values
        for section in sections:
            table = table.get(section) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(table.get(name), str):
            yield key, table, name


def _absolute(key: str, text: str, base: Path) -> str:
    if not text or "\0" in text or "://" in text or text.startswith("~"):
        return text
    try:
        if not INPUTS[key](text, base) or Path(text).is_absolute():
            return text
        return _joined(base.resolve(), text, key == SOURCE)
    except (OSError, ValueError):  # an impossible file name, reported on opening
        return text


def _joined(base: Path, text: str, pattern: bool) -> str:
    parts = list(Path(text).parts)
    # A leading ".." of a directory without symbolic links is its parent. Later parts may contain links.
    while parts and parts[0] == "..":
        base, parts = base.parent, parts[1:]
    whole = base.joinpath(*parts)
    if pattern and MAGIC & set(text) and not whole.exists():
        return str(Path(glob.escape(str(base))).joinpath(*parts))  # the directory's own name is not a pattern
    return str(whole)
