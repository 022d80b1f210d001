"""A hook of mkdocs.yml: what GitHub shows of a page and a site of docs/ alone cannot, rewritten.

Links to files outside of docs/ become the names of these files, fences that say what draws them become text, and code
in tables keeps no backslash before its bars.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(((?:\.\./)+[^)\s]+)\)")
CODE = re.compile(r"`[^`\n]*`")
# ```timeline zbv pp=3 chunks=2 micro=6
DRAWN = re.compile(r"^```(\w+) ([^\n]+)$", re.MULTILINE)


def without_outside_links(markdown: str, page: str) -> str:
    """``page``: its path within docs/."""

    def named(found: re.Match[str]) -> str:
        label, target = found[1], found[2]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
        if path.startswith("docs/"):
            return found[0]
        return label if label.strip("`/") in path else f"{label} (`{path}`)"

    return LINK.sub(named, markdown)


def plain_bars(markdown: str) -> str:
    """GitHub's tables want a bar in code escaped, Python's Markdown shows the backslash."""
    lines = (
        CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in markdown.split("\n")
    )
    return "\n".join(lines)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page."""
    titled = DRAWN.sub(r'```text title="\1 \2"', markdown)
    return plain_bars(without_outside_links(titled, page.file.src_uri))
