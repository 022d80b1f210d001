"""Find the settings in a file of any format: JSON, YAML, TOML, Python, a notebook, a shell script.

Nothing is imported or executed.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.facts.config import Config
from shoal.facts.config.check import shorten
from shoal.facts.input.other_files import Kind, explain, kind_of, kinds_of
from shoal.facts.input.untrusted_files import (
    LARGEST_JSON,
    check_plain,
    parse_json,
    parse_toml,
    read_bytes,
    read_settings,
)
from shoal.facts.problem import BadInput
from shoal.plan.importers import megatron, sagemaker, torchtitan
from shoal.plan.importers.launch_line import LaunchLine, launch_lines
from shoal.plan.importers.nemo import is_nemo
from shoal.plan.importers.python_file import Script, read_python
from shoal.plan.importers.shell_file import read_shell

FORMS = (
    "a DeepSpeed config (JSON, or a dictionary in Python), one of accelerate config (YAML), a torchtitan config "
    "(Python, or TOML), Megatron's arguments (a shell script or the arguments alone), or a script of NeMo, "
    "Megatron-Bridge or SageMaker (Python)"
)
_YAML, _PYTHON, _SHELL = (
    (".yaml", ".yml"),
    (".py", ".ipynb"),
    (".sh", ".bash", ".slurm", ".sbatch", ".args", ".txt"),
)


@dataclass(frozen=True)
class ForeignSource:
    """Settings of one stack, and their name in the file."""

    kind: Kind
    values: dict[str, Any]
    name: str = ""  # of a dictionary in Python
    script: Script | None = None  # the whole Python file
    line: LaunchLine | None = None  # the command that starts the program
    conditions: bool = False  # whether parts of a shell script are conditional


def find_source(path: Path, name: str = "") -> ForeignSource:
    """The one set of settings in a file; ``name``: a dictionary's, if there are several."""
    text = _read(path)
    suffix = path.suffix.lower()
    if name and suffix not in _PYTHON:
        raise BadInput(f"{path}:{name}: a name goes with a dictionary in a Python file", str(path))
    if suffix in _PYTHON:
        return _one(path, _in_python(_code(path, text), path), name)
    if suffix in _SHELL or text.startswith("#!"):
        return _one(path, _in_shell(text, path))
    if suffix in _YAML:
        return _of_table(path, _parse_yaml(text, path))
    if suffix == ".toml":
        try:
            return _of_table(path, parse_toml(text))
        except ValueError as error:
            raise BadInput(f"{path} is not valid TOML: {error}", FORMS) from None
    if suffix == ".json" or text.lstrip()[:1] in ("{", "["):
        return _of_table(path, parsed_json(text, path))
    return _one(path, _in_shell(text, path))


def read_table(path: Path) -> dict[str, Any]:
    """A JSON or YAML file that another file names."""
    text = _read(path)
    values = _parse_yaml(text, path) if path.suffix.lower() in _YAML else parsed_json(text, path)
    return _table(path, values)


def _read(path: Path) -> str:
    try:
        if path.suffix.lower() == ".ipynb":
            return read_bytes(path, LARGEST_JSON).decode("utf-8-sig")
        return read_settings(path)
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}", FORMS) from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}", FORMS) from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8", FORMS) from None
    except ValueError as error:
        raise BadInput(f"cannot read {path}: {error}", FORMS) from None


def parsed_json(text: str, path: Path) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadInput(
            f"{path} is not valid JSON: {error}",
            f"{FORMS}; a file's ending says which: .yaml, .toml, .py, .sh",
        ) from None


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
        raise BadInput(f"{path} is not valid YAML: {one_line(str(error))}", FORMS) from None


def one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _table(path: Path, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise BadInput(f"{path} holds {shorten(repr(values))}, not a table of settings", FORMS)
    return {str(key): value for key, value in values.items()}


def _of_table(path: Path, values: Any) -> ForeignSource:
    table = _table(path, values)
    if not kinds_of(table) and path.suffix.lower() == ".toml" and table.keys() & Config.model_fields.keys():
        raise BadInput(f"{path} is a Shoal config already", f"shoal train {path}")
    if not kinds_of(table) and (kind := kind_of(table)) is not None:
        raise explain(kind, path, table)
    return _one(path, [ForeignSource(kind, table) for kind in kinds_of(table)])


def _one(path: Path, found: list[ForeignSource], name: str = "") -> ForeignSource:
    """The one that is meant of all settings in a file; ambiguity raises instead of guessing."""
    if name:
        found = [one for one in found if one.name == name]
    if not found:
        wanted = f"{path}:{name}" if name else str(path)
        raise BadInput(f"{wanted} is not a config of any stack that shoal init reads", FORMS)
    kinds = sorted({CALLED[one.kind] for one in found})
    if len(kinds) > 1:
        fix = "keep one of them in a file of its own"
        if names := [one.name for one in found if one.name]:
            fix = f"say which: --from {path}:{names[0]}"
        raise BadInput(f"{path} holds {' and '.join(kinds)}: which one is meant?", fix)
    if len(found) > 1:
        names = [one.name or (one.line.launcher if one.line else "") for one in found]
        fix = (
            f"say which: --from {path}:{names[0]}"
            if found[0].name
            else "keep one of them in a file of its own"
        )
        raise BadInput(f"{path} holds {len(found)} of {kinds[0]}: {', '.join(names)}", fix)
    return found[0]


CALLED: dict[Kind, str] = {
    "deepspeed": "DeepSpeed's config",
    "accelerate": "Accelerate's config",
    "megatron": "Megatron's arguments",
    "torchtitan": "torchtitan's config",
    "nemo": "NeMo's or Megatron-Bridge's script",
    "sagemaker": "SageMaker's distribution",
    "arguments": "Hugging Face's TrainingArguments",
    "model": "a model's config.json",
    "settings": "another tool's settings",
}


def _code(path: Path, text: str) -> str:
    """The code cells of a notebook, without its own commands."""
    if path.suffix.lower() != ".ipynb":
        return text
    try:
        cells = json.loads(text)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadInput(f"{path} is not a notebook", FORMS) from None
    return "\n".join(re.sub(r"^\s*[%!?].*$", "", one, flags=re.MULTILINE) for one in code)


def _in_python(text: str, path: Path) -> list[ForeignSource]:
    try:
        script = read_python(text)
    except ValueError as error:
        raise BadInput(f"{path} is not valid Python: {error}", FORMS) from None
    try:
        for values in script.dictionaries.values():
            check_plain(values)  # a name may refer to a dictionary many times, or to itself
    except ValueError as error:
        raise BadInput(f"{path}: a dictionary in it cannot be read: {error}", FORMS) from None
    found = [
        ForeignSource(kind, values, name, script)
        for name, values in script.dictionaries.items()
        for kind in kinds_of(values)
        if kind in ("deepspeed", "sagemaker")
    ]
    # A dictionary that is part of another, or has two names, counts once.
    whole = [
        one
        for one in found
        if not any(_inside(one.values, other.values) for other in found if other is not one)
    ]
    distinct: list[ForeignSource] = []
    for one in whole:
        if all(one.values != other.values for other in distinct):
            distinct.append(one)
    if is_nemo(script):
        distinct.append(ForeignSource("nemo", {}, "", script))
    if (titan := torchtitan.settings(script)) is not None:
        if (count := torchtitan.configs(script)) > 1:
            raise BadInput(
                f"{path} holds {count} configs of torchtitan", "keep one of them in a file of its own"
            )
        distinct.append(ForeignSource("torchtitan", titan, "", script))
    if (job := sagemaker.distribution(script)) is not None:
        distinct.append(ForeignSource("sagemaker", job, "", script))
    return distinct


def _inside(part: Any, whole: Any) -> bool:
    return isinstance(whole, dict) and any(part == one or _inside(part, one) for one in whole.values())


def _in_shell(text: str, path: Path) -> list[ForeignSource]:
    try:
        script = read_shell(text)
    except ValueError as error:
        raise BadInput(f"{path} is not a shell script that can be read: {error}", FORMS) from None
    found = []
    for line in launch_lines(script):
        names = {name.replace("_", "-") for name in line.options}
        if line.launcher == "accelerate":
            found.append(ForeignSource("accelerate", {}, "", None, line, script.conditions))
        elif names & {"deepspeed", "deepspeed-config"} and not names & {"tensor-model-parallel-size"}:
            found.append(ForeignSource("deepspeed", {}, "", None, line, script.conditions))
        elif names & megatron.SIGNS:
            found.append(ForeignSource("megatron", {}, "", None, line, script.conditions))
    return found
