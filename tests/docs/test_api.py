"""The page of the API says what the docstrings say, about every public name."""

from __future__ import annotations

from tests.docs import api

import shoal


def test_every_public_name_is_described() -> None:
    assert sorted([*api.ORDER, "__version__"]) == sorted(shoal.__all__)
    for name in api.ORDER:
        assert api.prose(api.CALLED.get(name) or getattr(shoal, name)), name


def test_the_page_is_what_the_docstrings_say() -> None:
    """If not: ``python -m tests.docs.api``."""
    page = api.PAGE.read_text()
    assert all(f"## `shoal.{name}`" in page for name in api.ORDER)
    assert api.written(page) == page
