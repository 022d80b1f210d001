"""Config files: read, overridden and validated, with the place where each value came from."""

from __future__ import annotations

import re
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from shoal.facts.config import Config
from shoal.facts.problem import BadInput, Problem, did_you_mean


@dataclass(frozen=True)
class Loaded:
    """A config and, for every dotted key, where its value came from: ``default``, ``FILE:LINE``, ``--set``, …"""

    config: Config
    origins: dict[str, str]

    def origin(self, key: str) -> str:
        """Where a value came from; one inside a table that ``--set`` gave whole came with the table."""
        table = key.rpartition(".")[0]
        inherited = self.origins.get(table) if self.origins.get(table) == "--set" else None
        return self.origins.get(key) or inherited or "default"


def load(path: Path | None, overrides: list[str] | None = None, layout: str | None = None) -> Loaded:
    """Read a file, then ``--set``, then ``--layout``; report everything wrong with all three at once."""
    text = _read(path) if path else ""
    values = _parse(text, path)
    origins = {key: f"{path}:{line}" for key, line in key_lines(text).items()} if path else {}
    problems: list[Problem] = []
    if path is not None and "name" not in values.get("run", {}):
        # Two configs side by side should not share a directory just because neither names its run.
        values.setdefault("run", {})["name"] = path.stem
        origins["run.name"] = f"the name of {path}"
    for override in overrides or []:
        problem = _override(values, origins, override)
        if problem:
            problems.append(problem)
    if layout is not None:
        values["layout"] = layout
        origins["layout"] = "--layout"
    problems.extend(_unknown_keys(values, Config, "", origins))
    if problems:
        raise BadInput(problems)
    try:
        config = Config.model_validate(values)
    except BadInput as error:
        where = origins.get("layout", "layout")
        raise BadInput(
            [Problem(f"{where}: {problem.what}", problem.fix) for problem in error.problems]
        ) from None
    except ValidationError as error:
        raise BadInput(_explain(error, origins)) from None
    return Loaded(config, origins)


def write(config: Config) -> str:
    """The complete config as TOML: what a run directory keeps."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def flatten(value: BaseModel | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"recipe.lr": 0.003, …}``: every value under its dotted key."""
    pairs = (
        ((name, getattr(value, name)) for name in type(value).model_fields)
        if isinstance(value, BaseModel)
        else value.items()
    )
    flat: dict[str, Any] = {}
    for name, inner in pairs:
        if isinstance(inner, (BaseModel, dict)):
            flat.update(flatten(inner, f"{prefix}{name}."))
        else:
            flat[prefix + name] = inner
    return flat


def describe(key: str) -> str:
    """What a value means, in the schema's words."""
    *path, last = key.split(".")
    schema: Any = _annotation(Config, path) if path else Config
    field = schema.model_fields.get(last) if _is_table(schema) else None
    return (field.description or "") if field else ""


def key_lines(text: str) -> dict[str, int]:
    """The line of every key in a TOML file. The standard parser keeps none, and a message needs one."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$", line)
        pair = re.match(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=", line)
        if header:
            table = _bare(header[1]) + "."
            lines.setdefault(table[:-1], number)
        elif pair:
            lines.setdefault(table + _bare(pair[1]), number)
    return lines


def _bare(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"there is no config file {path}", "shoal init writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}", "a config is a TOML file in UTF-8") from None


def _parse(text: str, path: Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(
            f"{path} is not valid TOML: {error}", 'text values need quotes: name = "my run"'
        ) from None


def _override(values: dict[str, Any], origins: dict[str, str], override: str) -> Problem | None:
    """Apply one ``a.b=c`` to the values, or say what is wrong with it."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        return Problem(f"--set {override}: there is no '='", "--set recipe.lr=0.001")
    table = values
    *path, last = key.split(".")
    for name in path:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            return Problem(f"--set {override}: {name} is a value, not a table", "--set recipe.lr=0.001")
        table = inner
    table[last] = _value(text, _annotation(Config, key.split(".")))
    for stale in [known for known in origins if known.startswith(key + ".")]:
        del origins[stale]
    origins[key] = "--set"
    return None


def _value(text: str, annotation: Any) -> Any:
    """TOML where it parses and the field is not text; else the text as it stands."""
    if annotation is str:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _annotation(schema: type[BaseModel], path: list[str]) -> Any:
    """The type of a field, with ``| None`` taken off; None where there is no such field."""
    field = schema.model_fields.get(path[0])
    if field is None:
        return None
    annotation = _without_none(field.annotation)
    if len(path) == 1:
        return annotation
    return _annotation(annotation, path[1:]) if _is_table(annotation) else None


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _unknown_keys(
    values: dict[str, Any], schema: type[BaseModel], prefix: str, origins: dict[str, str]
) -> list[Problem]:
    problems = []
    for name, value in values.items():
        key = prefix + name
        if name not in schema.model_fields:
            where = origins.get(key) or next((o for k, o in origins.items() if k.startswith(key + ".")), "")
            hint = did_you_mean(name, schema.model_fields)
            if not prefix and "did you mean" not in hint:
                hint = _elsewhere(name) or hint
            problems.append(Problem(f"{where + ': ' if where else ''}unknown key {key!r}", hint))
            continue
        annotation = _annotation(schema, [name])
        if isinstance(value, dict) and _is_table(annotation):
            problems.extend(_unknown_keys(value, annotation, key + ".", origins))
    return problems


def _elsewhere(name: str) -> str:
    """A top-level key that belongs into a table is the commonest slip: say which table."""
    for section, field in Config.model_fields.items():
        if _is_table(field.annotation) and name in _annotation(Config, [section]).model_fields:
            return f"did you mean '{section}.{name}'?"
    return ""


def _explain(error: ValidationError, origins: dict[str, str]) -> list[Problem]:
    problems = []
    for detail in error.errors():
        key = ".".join(
            str(part)
            for part in detail["loc"]
            if not str(part).startswith(("int", "float", "str", "constrained"))
        )
        where = origins.get(key) or next((origins[k] for k in origins if key.startswith(k + ".")), "")
        annotation = _annotation(Config, key.split("."))
        if typing.get_origin(annotation) is typing.Literal and isinstance(detail["input"], str):
            fix = did_you_mean(detail["input"], [str(choice) for choice in typing.get_args(annotation)])
        else:
            meaning = describe(key) if key else ""
            fix = f"{key} is {meaning}" if meaning else "shoal config show lists every key with its default"
        message = re.sub(r"^Value error, ", "", detail["msg"])
        shown = "" if isinstance(detail["input"], dict) else f" = {detail['input']!r}"
        problems.append(Problem(f"{where + ': ' if where else ''}{key}{shown}: {message}", fix))
    return _once(problems)


def _once(problems: list[Problem]) -> list[Problem]:
    """A union reports each of its arms; one message a key is enough."""
    seen: dict[str, Problem] = {}
    for problem in problems:
        seen.setdefault(problem.what.rsplit(": ", 1)[0], problem)
    return list(seen.values())


def template() -> str:
    """A config file with every key commented out, at its default, with its meaning."""
    lines = ["# A Shoal config. Everything has a default: uncomment what you want to change.", ""]
    table = ""
    for key, value in flatten(Config()).items():
        section, _, name = key.rpartition(".")
        if section != table:
            table = section
            lines += ["", f"[{section}]"]
        # TOML has no null: a key without a default is shown with nothing to its right.
        shown = "" if value is None else tomli_w.dumps({"value": value}).removeprefix("value = ").strip()
        lines.append(f"# {f'{name} = {shown}':<36} # {describe(key)}".rstrip(" #"))
    return "\n".join(lines) + "\n"
