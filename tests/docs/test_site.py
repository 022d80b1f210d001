"""The site of mkdocs.yml: every page has its place, strict links hold, and no page asks another host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs.site_pages import plain_bars, without_outside_links

ROOT = Path(__file__).parents[2]
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from pages(part)


def test_every_page_has_one_place() -> None:
    """A new page needs one line in mkdocs.yml, in the section of its question."""
    existing = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages(SETTINGS["nav"])) == sorted(existing)


def test_sections_follow_the_reader() -> None:
    assert [next(iter(part)) for part in SETTINGS["nav"][1:]] == [
        "Start",
        "Choose",
        "Prove",
        "Run",
        "Keep",
        "Reference",
    ]
    assert SETTINGS["theme"]["font"] is False


def test_links_out_of_the_docs_become_names() -> None:
    text = "[plan/choose.py](../src/shoal/plan/choose.py), [a file](../examples/dpo.toml), [here](../data.md)"
    assert without_outside_links(text, "strategies/shard.md").endswith("[here](../data.md)")
    assert without_outside_links(text, "planner.md").startswith(
        "plan/choose.py, a file (`examples/dpo.toml`)"
    )
    assert plain_bars("| `zero=1\\|2` | x |\n`a\\|b`") == "| `zero=1|2` | x |\n`a\\|b`"


@pytest.mark.system
def test_it_builds_with_strict_links_and_asks_no_other_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    html = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(html) >= len([*pages(SETTINGS["nav"])])
    for path, page in html.items():
        # Links are for a reader to follow; everything else would be fetched.
        fetched = re.findall(r"<(?!a\b)\w+\b[^>]*\b(?:src|href)=\"?(https?:[^\s\">]+)", page)
        assert fetched == [], path
        # A list or a table that Markdown has not seen as one.
        assert not re.search(r"<p>(?:(?!</p>).)*\n(?:- |\d\. |\|-)", page, re.DOTALL), path
        assert not re.search(r"<td>[^\n]*\\\|", page), path
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s*)['\"]?https?:", sheet.read_text()), sheet
