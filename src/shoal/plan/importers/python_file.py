"""Settings in a Python file, read from its syntax tree: nothing is imported or executed.

Values are literals, arithmetic on them, and names assigned to such; everything else is ``Unknown``. All scopes are
read as one, from top to bottom, which matches how settings scripts are written.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.plan.importers.reading import Unknown

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_LARGEST = 10**18  # the largest result of arithmetic


@dataclass(frozen=True)
class Call:
    """A call: the last part of the callee's name, and its keywords; for ``run.Config``, the class passed to it."""

    name: str
    path: str  # the full dotted name
    keywords: dict[str, Any]
    arguments: tuple[Any, ...] = ()  # positional


@dataclass
class Script:
    """The contents of a Python file: values by name, calls, and attribute assignments."""

    values: dict[str, Any] = field(default_factory=dict)
    dictionaries: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the name assigned to
    calls: list[Call] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)  # by dotted name
    imports: dict[str, str] = field(default_factory=dict)  # the module that each name comes from


def read_python(text: str) -> Script:
    """Raises ``ValueError`` with one line if it is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):  # an odd but legal literal
            tree = ast.parse(text)
        reader = _Reader()
        reader.visit(tree)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deep") from None
    return reader.script


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self.script = Script()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.script.imports |= {name.asname or name.name: node.module or "" for name in node.names}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        value = self.value(node.value)
        for target in node.targets:
            self.assign(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self.assign(node.target, self.value(node.value))

    def visit_Call(self, node: ast.Call) -> None:
        path = _dotted(node.func) or ""
        named = [word for word in node.keywords if word.arg is not None]
        keywords = {str(word.arg): self.value(word.value) for word in named}
        first = _dotted(node.args[0]) if node.args else None
        if first and path.rpartition(".")[2] in ("Config", "Partial"):
            path = first  # run.Config(nl.MegatronStrategy, …) is a deferred call
        plain = tuple(self.value(argument) for argument in node.args)
        self.script.calls.append(Call(path.rpartition(".")[2], path, keywords, plain))
        for name, value in keywords.items():
            if isinstance(value, dict):
                self.script.dictionaries.setdefault(name, value)
        self.generic_visit(node)

    def assign(self, target: ast.expr, value: Any) -> None:
        script = self.script
        if isinstance(target, ast.Name):
            script.values[target.id] = value
            if isinstance(value, dict):
                script.dictionaries[target.id] = value
        elif isinstance(target, ast.Attribute) and (path := _dotted(target)):
            script.attributes[path] = value
        elif isinstance(target, ast.Subscript):
            table, key = self.value(target.value), self.value(target.slice)
            if isinstance(table, dict) and isinstance(key, str) and not isinstance(key, Unknown):
                table[key] = value

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, without executing anything."""
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            found = self.inner(node)
        return Unknown(_text(node)) if found is None else found

    def inner(self, node: ast.expr) -> Any:
        """The value of an expression that is not a literal as a whole; None if unknown."""
        if isinstance(node, ast.Name):
            return self.script.values.get(node.id)
        if isinstance(node, ast.Dict):
            return self.table(node)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Subscript):
            table, key = self.value(node.value), self.value(node.slice)
            return table.get(key) if isinstance(table, dict) and isinstance(key, str) else None
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _compute(_ARITHMETIC[type(node.op)], self.value(node.left), self.value(node.right))
        if isinstance(node, ast.Call) and _dotted(node.func) == "dict" and not node.args:
            return {word.arg: self.value(word.value) for word in node.keywords if word.arg is not None}
        return None

    def table(self, node: ast.Dict) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.value(value)
            if key is None:  # ``**others``
                found |= inner if isinstance(inner, dict) else {}
            else:
                found[str(self.value(key))] = inner
        return found


def _compute(how: Callable[[Any, Any], Any], left: Any, right: Any) -> float | None:
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (left, right))
    if not numbers or max(abs(left), abs(right)) > _LARGEST:
        return None
    try:
        result: float = how(left, right)
    except ZeroDivisionError:
        return None
    return result


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (outer := _dotted(node.value)):
        return f"{outer}.{node.attr}"
    return None


def _text(node: ast.expr) -> str:
    return " ".join(ast.unparse(node).split())
