"""Config files: read, override, validate, and record where each value came from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from shoal.facts.config import Config, describe, find_field, type_of
from shoal.facts.config.check import explain, place_of, refuse_passwords, remove_unknown, toml_value, where_of
from shoal.facts.config.implied import TOKENIZER, own_tokenizer
from shoal.facts.config.key_lines import key_lines
from shoal.facts.config.paths import resolve_paths
from shoal.facts.input.other_files import is_directory, not_a_config
from shoal.facts.input.untrusted_files import DEEPEST, parse_toml, read_settings
from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput, Problem, shorten
from shoal.facts.redact import redact_values

# Ways to specify the length of a run.
LENGTHS = ("steps", "tokens", "epochs")


@dataclass(frozen=True)
class Loaded:
    """A config and the origin of every dotted key that was given: ``FILE:LINE``, ``--set``, ``--layout``, …"""

    config: Config
    origins: dict[str, str]

    def origin(self, key: str) -> str:
        return self.origins.get(key, "default")

    @contextmanager
    def located(self) -> Iterator[None]:
        """In this context, a problem that names a key of this config, or begins with one, also reports its origin."""
        try:
            yield
        except BadInput as error:
            error.problems = tuple(map(self._locate, error.problems))
            raise

    def _locate(self, problem: Problem) -> Problem:
        key = problem.where or re.split(r"[:\s]", problem.what, maxsplit=1)[0]
        if find_field(key) is None:
            return problem
        return replace(problem, where=where_of(self.origins.get(key, ""), key))


def load(path: Path | None, overrides: list[str] | None = None, layout: str | None = None) -> Loaded:
    """Read a file, then ``--set``, then ``--layout``; all errors in the three are reported at once."""
    text = _read(path) if path else ""
    values = _parse(text, path)
    places = {key: f"{path}:{line}" for key, line in key_lines(text).items()}
    problems = [
        problem
        for override in overrides or []
        if (problem := _override(values, places, override)) is not None
    ]
    if layout is not None:
        values["layout"], places["layout"] = layout, "--layout"
    if path is not None:
        _name_after_file(values, places, path)
    _last_word_on_length(values, places)
    resolve_paths(values, lambda key: _base(path, place_of(places, key)))
    _imply_tokenizer(values, places)
    problems += remove_unknown(values, places)
    problems += refuse_passwords(flatten(values), places)
    problems += _check_layout(values, places)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise BadInput(problems + explain(error, places)) from None
    if problems:
        raise BadInput(problems)
    origins = {key: place_of(places, key) for key in flatten(values)}
    if config.recipe.tokens is not None:
        origins["recipe.steps"] = "recipe.tokens"
    return Loaded(config, origins)


def write(config: Config) -> str:
    """The complete config as TOML, as stored in a run directory, so without secrets."""
    return tomli_w.dumps(redact_values(config.model_dump(exclude_none=True)))


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


def template() -> str:
    """A config file with every key commented out, at its default, with its meaning."""
    lines = ["# A Shoal config. Everything has a default: uncomment what you want to change.", ""]
    table = ""
    for key, value in flatten(Config()).items():
        section, _, name = key.rpartition(".")
        if section != table:
            table = section
            lines += ["", f"[{section}]"]
        # TOML has no null: a key without a default is shown without a value.
        pair = f"{name} =" if value is None else f"{name} = {toml_value(value)}"
        lines.append(f"# {pair:<36} # {describe(key)}")
    return "\n".join(lines) + "\n"


def _base(path: Path | None, place: str) -> Path:
    """The directory that relative paths refer to, depending on where they were written."""
    return Path.cwd() if path is None or place == "--set" else path.parent


def _read(path: Path) -> str:
    form = "a config is a TOML file in UTF-8; shoal init writes one"
    try:
        return read_settings(path)
    except FileNotFoundError:
        missing = Problem(f"there is no config file {path}", "shoal init writes one", str(path))
        raise BadInput(missing) from None
    except IsADirectoryError:
        raise is_directory(path) from None
    except OSError as error:
        raise BadInput(Problem(f"cannot read {path}: {error.strerror}", form, str(path))) from None
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#x}"
        raise BadInput(Problem(what, form, str(path))) from None
    except ValueError as error:
        raise BadInput(Problem(f"cannot read {path}: {error}", form, str(path))) from None


def _parse(text: str, path: Path | None) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:  # not only its own error: also overlong numbers
        if path is not None and (other := not_a_config(path, text)) is not None:
            raise other from None
        fix = (
            "a config is a TOML file; shoal init writes one"
            if path is not None and path.suffix.lower() in (".json", ".yaml", ".yml")
            else 'key = value, where text has quotes: name = "my run"'
        )
        line = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{line[1]}" if line else str(path)
        raise BadInput(Problem(f"{path} is not valid TOML: {error}", fix, where)) from None


def _override(values: dict[str, Any], places: dict[str, str], override: str) -> Problem | None:
    """Apply one ``a.b=c`` to the values, or return what is wrong with it."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or key.count(".") > DEEPEST:
        short = shorten(override, 60)
        return Problem(f"--set {short}: it is not KEY=VALUE", "as in --set recipe.lr=0.001", f"--set {short}")
    table = values
    *path, last = key.split(".")
    for depth, name in enumerate(path, start=1):
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            outer = ".".join(path[:depth])
            what = f"--set {key}=…: {outer} is a value, not a table"
            return Problem(what, f"--set {outer}=…", f"--set {key}")
        table = inner
    field = find_field(key)
    if not text and field is not None and field.default is None:
        table.pop(last, None)  # TOML has no null, so an empty value means "none" where that is allowed
    else:
        table[last] = _value(text, field)
    for stale in [known for known in places if known.startswith(key + ".")]:
        del places[stale]
    places[key] = "--set"
    return None


def _value(text: str, field: FieldInfo | None) -> Any:
    """Parse as TOML unless the field is text or parsing fails; then the text itself."""
    if field is not None and type_of(field) is str:
        return text
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if len(parsed) == 1 else text  # more than one: the text had several lines


def _name_after_file(values: dict[str, Any], places: dict[str, str], path: Path) -> None:
    """Name the run after the file, so that two configs side by side do not share a directory."""
    run = values.setdefault("run", {})
    if isinstance(run, dict) and "name" not in run:
        run["name"] = path.stem.encode(errors="replace").decode()
        places["run.name"] = f"the name of {path}"


def _imply_tokenizer(values: dict[str, Any], places: dict[str, str]) -> None:
    """Use the model's own tokenizer unless another is named: with any other its weights are meaningless."""
    data = values.setdefault("data", {})
    if not isinstance(data, dict) or "tokenizer" in data:
        return
    found = own_tokenizer(values.get("model"))
    if found is not None:
        places[TOKENIZER], data["tokenizer"] = found


def _last_word_on_length(values: dict[str, Any], places: dict[str, str]) -> None:
    """``--set recipe.steps`` also overrides a file's ``tokens`` or ``epochs``, and so on, since they mean the same."""
    recipe = values.get("recipe")
    if not isinstance(recipe, dict):
        return
    given = {name: place_of(places, f"recipe.{name}") == "--set" for name in LENGTHS if name in recipe}
    if any(given.values()) and not all(given.values()):
        for name in (name for name, said in given.items() if not said):
            del recipe[name]


def _check_layout(values: dict[str, Any], places: dict[str, str]) -> list[Problem]:
    """A layout can have several errors at once, so it is parsed here and not only as one value of the config."""
    written = values.get("layout")
    if not isinstance(written, str) or written.strip() == "auto":
        return []
    try:
        Layout.parse(written)
        return []
    except BadInput as error:
        del values["layout"]
        place = place_of(places, "layout")
        return [
            Problem(
                problem.what.replace("layout", place, 1)
                if place == "--layout"
                else f"{place}: {problem.what}",
                problem.fix,
                where_of(place, "layout"),
            )
            for problem in error.problems
        ]
