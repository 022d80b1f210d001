"""The drawings of docs/pictures are what the code draws today; pictures of pages are small enough for a README."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.pictures import FOLDER, PICTURES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PICTURES)
def test_a_drawing_is_what_the_code_draws(name: str) -> None:
    """``python -m tests.docs.pictures`` draws them anew."""
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name]()


def test_every_picture_is_shown_and_small() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    for picture in FOLDER.iterdir():
        assert f"pictures/{picture.name})" in shown, picture.name
        assert picture.stat().st_size <= 200_000, picture.name
