"""docs/api.md, from ``shoal.__all__`` and its docstrings: ``python -m tests.docs.api`` writes it."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.docs.scenarios import block

import shoal
from shoal.launch.library import launch
from shoal.plan.report import plan
from shoal.predict.library import predict

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
# Packages that can be called: what a call of them calls.
CALLED = {"launch": launch, "plan": plan, "predict": predict}
# In the order of a reader; a test holds it to ``__all__``.
ORDER = (
    "run",
    "Run",
    "launch",
    "parity",
    "dryrun",
    "plan",
    "predict",
    "Layout",
    "Model",
    "Cluster",
    "BadInput",
)


def prose(value: Any) -> str:
    """A docstring in Markdown."""
    text = (inspect.getdoc(value) or "").replace("``", "`")
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def signature(function: Any) -> str:
    """As it is written in the source: annotations and defaults unevaluated, so the same under every version."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    arguments.posonlyargs = [one for one in arguments.posonlyargs if one.arg not in ("self", "cls")]
    arguments.args = [one for one in arguments.args if one.arg not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    written = f"{node.name}({ast.unparse(arguments)}){returns}"
    if len(written) <= 100:
        return written
    parts = _parts(arguments)
    return f"{node.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _parts(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    absent = [None] * (len(positional) - len(arguments.defaults))
    for one, default in zip(positional, [*absent, *arguments.defaults], strict=True):
        yield _argument(one, default)
    if arguments.kwonlyargs or arguments.vararg:
        yield f"*{arguments.vararg.arg if arguments.vararg else ''}"
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(one, default)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(one) + (f" = {ast.unparse(default)}" if default is not None else "")


def members(kind: type) -> Iterator[str]:
    """Public methods and properties with a docstring, in the order of the source."""
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property) and value.fget and prose(value.fget):
            yield f"- `{name}`: {prose(value.fget)}"
        function = value.__func__ if isinstance(value, classmethod) else value
        if inspect.isfunction(function) and prose(function):
            first, _, rest = prose(function).partition("\n\n")
            more = textwrap.indent("\n\n" + rest + "\n", "    ") if rest else ""
            yield f"- `{' '.join(signature(function).split()).replace('( ', '(').replace(', )', ')')}`: {first}{more}"


def fields(kind: Any) -> str:
    """Of a model of facts, which is made by name."""
    names = [f"`{name}`" for name in getattr(kind, "model_fields", {})]
    return f"Fields: {', '.join(names)}." if names else ""


def entry(name: str) -> str:
    value = getattr(shoal, name)
    parts = [f"## `shoal.{name}`"]
    if isinstance(value, ModuleType):
        value = CALLED[name]
    if inspect.isfunction(value):
        parts.append(f"```python\n{signature(value)}\n```")
    parts.append(prose(value))
    if inspect.isclass(value):
        parts += [fields(value), "\n".join(members(value))]
    return "\n\n".join(part for part in parts if part)


def written(page: str) -> str:
    return block("api", "\n\n".join(entry(name) for name in ORDER), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    sys.stdout.write(f"wrote {PAGE.name}\n")
