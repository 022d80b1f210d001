"""The list of files in docs/architecture.md: ``python -m tests.docs.files`` brings it up to date."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shoal"
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"(<!-- files -->\n)(.*?)(<!-- end -->)", re.DOTALL)
LINE = re.compile(r"^- `([\w/]+\.py)`: (.+)$", re.MULTILINE)


def existing() -> list[str]:
    """Every file of the source, packages before what is in them."""
    paths = (path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    return sorted(paths, key=lambda path: (path.rpartition("/")[0], path.replace("__init__", "")))


def listed(page: str) -> list[tuple[str, str]]:
    block = BLOCK.search(page)
    assert block, "no list of files"
    return LINE.findall(block[2])


def summary(path: str) -> str:
    """The first paragraph of a file's docstring."""
    text = ast.get_docstring(ast.parse((SOURCE / path).read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def written(page: str) -> str:
    """The page with a line for every file: known ones keep theirs."""
    known = dict(listed(page))
    lines, package = [], ""
    for path in existing():
        above = path.rpartition("/")[0]
        if above and above != package:
            lines.append(f"\n**{above}**\n")
        package = above
        lines.append(f"- `{path}`: {known.get(path) or summary(path)}")
    return BLOCK.sub(lambda block: block[1] + "\n".join(lines) + "\n" + block[3], page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
