"""Every message on the page of troubleshooting is one that the source can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.docs import files

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\*\*`(.+)`\*\*$", PAGE, re.MULTILINE)


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a file, with … for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield re.sub("…+", "…", "".join(parts))


@cache
def printed() -> str:
    return "\n".join(
        text for path in files.existing() for text in texts(ast.parse((files.SOURCE / path).read_text()))
    )


def test_there_are_many_and_each_has_an_explanation() -> None:
    assert len(MESSAGES) >= 30 and len(set(MESSAGES)) == len(MESSAGES)
    assert len(re.findall(r"^:   \S", PAGE, re.MULTILINE)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_source_has_this_message(message: str) -> None:
    assert message in printed(), "the source says it otherwise now"
